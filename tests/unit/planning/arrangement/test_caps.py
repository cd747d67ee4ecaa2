"""The memory of a group goes where requests need it, never below what they have, and does not go to and fro."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from elastic.planning.arrangement.caps import (
    GAIN,
    KEPT,
    Need,
    SharedMemory,
    better_caps,
    caps_by_need,
    fitting_caps,
    largest_caps,
)

HALVES = SharedMemory({"a": 300, "b": 300}, {"a": {"a": 3, "b": 3}, "b": {"a": 3, "b": 3}})
"""Two instances, half of the layers at each of two ranks: 100 sectors together."""
FAIR = {"a": 50, "b": 50}


@st.composite
def groups(draw: st.DrawFn) -> tuple[SharedMemory, dict[str, Need], dict[str, int]]:
    """Two to four instances, layers of each anywhere, and needs that fit."""
    names = draw(st.lists(st.sampled_from("abcd"), min_size=2, unique=True))
    takes = {rank: {home: draw(st.integers(0, 6)) for home in names} for rank in names}
    for home in names:
        takes[home][home] = max(1, takes[home][home])
    sectors = st.integers(0, 200)
    needs = {h: Need(draw(sectors), draw(sectors), draw(st.integers(200, 500)), draw(st.booleans())) for h in names}
    spare = draw(st.integers(0, 1000))
    pages = {r: sum(needs[h].committed * count for h, count in at.items()) + spare for r, at in takes.items()}
    return SharedMemory(pages, takes), needs, {h: draw(sectors) for h in names}


@given(groups())
def test_caps_fit_everywhere_cover_what_there_is_and_leave_nothing(given_: tuple) -> None:
    memory, needs, fair = given_
    caps = caps_by_need(memory, needs, fair)
    assert caps is not None
    free = memory.free(caps)
    assert min(free.values()) >= 0
    for home, need in needs.items():
        assert need.committed <= caps[home] <= need.most
        room = all(free[rank] >= memory.takes(rank, home) for rank in free)
        assert caps[home] == need.most or not room, f"{home} could have one more"


@given(groups(), st.integers(0, 1000))
def test_caps_that_fit_no_more_fall_but_not_below_what_lives(given_: tuple, lost: int) -> None:
    memory, needs, fair = given_
    now = caps_by_need(memory, needs, fair)
    assert now is not None
    left = SharedMemory({rank: pages - lost for rank, pages in memory.pages.items()}, memory.sector_pages)
    caps = fitting_caps(left, needs, fair, now)
    committed = {home: need.committed for home, need in needs.items()}
    if min(left.free(now).values()) >= 0:
        assert caps is None
    elif min(left.free(committed).values()) >= 0:
        assert caps is not None
        assert min(left.free(caps).values()) >= 0
        assert all(caps[home] >= count for home, count in committed.items())
        assert fitting_caps(left, needs, fair, caps) is None
    else:
        assert caps == committed


@given(groups())
def test_caps_change_only_for_who_is_short_gains_and_then_stay(given_: tuple) -> None:
    memory, needs, fair = given_
    now = {home: max(fair[home], need.committed) for home, need in needs.items()}
    caps = better_caps(memory, needs, fair, now)
    if caps is None:
        return
    gained = [h for h, need in needs.items() if need.short and need.wanted > now[h] and caps[h] > now[h]]
    assert any(caps[home] - now[home] >= GAIN * now[home] for home in gained)
    assert better_caps(memory, needs, fair, caps) is None
    calm = {home: replace(need, short=False) for home, need in needs.items()}
    assert better_caps(memory, calm, fair, now) is None


def test_a_hot_instance_gets_what_an_idle_one_does_not_use() -> None:
    needs = {"a": Need(48, 200, 1000, short=True), "b": Need(0, 0, 1000)}
    kept = int(KEPT * FAIR["b"])
    assert better_caps(HALVES, needs, FAIR, FAIR) == {"a": 100 - kept, "b": kept}


def test_slack_goes_by_what_is_wanted() -> None:
    needs = {"a": Need(40, 60, 1000, short=True), "b": Need(10, 20, 1000)}
    assert caps_by_need(HALVES, needs, FAIR) == {"a": 75, "b": 25}


def test_instances_that_all_want_more_than_there_is_keep_their_fair_shares() -> None:
    needs = {"a": Need(40, 500, 1000, short=True), "b": Need(40, 500, 1000, short=True)}
    assert better_caps(HALVES, needs, FAIR, FAIR) is None


def test_what_does_not_fit_changes_nothing() -> None:
    needs = {"a": Need(60, 90, 1000, short=True), "b": Need(60, 0, 1000)}
    assert caps_by_need(HALVES, needs, FAIR) is None
    assert better_caps(HALVES, needs, FAIR, FAIR) is None


def test_an_instance_that_uses_other_ranks_is_not_held_back_by_them() -> None:
    apart = SharedMemory({"a": 300, "b": 30}, {"a": {"a": 3}, "b": {"b": 3}})
    assert caps_by_need(apart, {"a": Need(0, 5, 1000), "b": Need(5, 5, 1000)}, {"a": 5, "b": 5}) == {"a": 100, "b": 10}


def test_the_largest_request_goes_before_what_others_keep() -> None:
    needs = {"a": Need(0, 95, 1000, short=True, largest=95), "b": Need(0, 200, 1000, short=True)}
    caps = better_caps(HALVES, needs, FAIR, FAIR)
    assert caps is not None
    assert caps["a"] >= 95
    assert better_caps(HALVES, needs, FAIR, caps) is None


def test_caps_change_by_less_than_the_gain_where_a_request_needs_it() -> None:
    needs = {"a": Need(0, 52, 1000, short=True), "b": Need(0, 0, 1000)}
    assert better_caps(HALVES, needs, FAIR, {"a": 51, "b": 49}) is not None, "slack is much more"
    tight = {"a": Need(0, 52, 52, short=True), "b": Need(0, 0, 1000)}
    assert better_caps(HALVES, tight, FAIR, {"a": 51, "b": 49}) is None
    assert better_caps(HALVES, {**tight, "a": replace(tight["a"], largest=52)}, FAIR, {"a": 51, "b": 49}) is not None


def test_who_has_waited_longest_begins_first_also_by_less_than_the_gain() -> None:
    needs = {"a": Need(48, 60, 1000, short=True, first=52, waits_s=2.0), "b": Need(30, 400, 1000, short=True)}
    caps = better_caps(HALVES, needs, FAIR, FAIR)
    assert caps == {"a": 52, "b": 48}
    assert better_caps(HALVES, needs, FAIR, caps) is None
    both = {**needs, "b": Need(40, 400, 1000, short=True, first=50, waits_s=1.0)}
    assert caps_by_need(HALVES, both, FAIR) == {"a": 52, "b": 48}
    sooner = caps_by_need(HALVES, {**both, "a": replace(both["a"], waits_s=0.5)}, FAIR)
    assert sooner == {"a": 48, "b": 52}


@given(groups())
def test_the_largest_cap_fits_with_nothing_of_the_others_and_no_more_does(given_: tuple) -> None:
    memory, needs, _ = given_
    most = {home: need.most for home, need in needs.items()}
    for home, count in largest_caps(memory, most).items():
        caps = {**dict.fromkeys(needs, 0), home: count}
        assert min(memory.free(caps).values()) >= 0
        assert count == most[home] or min(memory.free({**caps, home: count + 1}).values()) < 0
