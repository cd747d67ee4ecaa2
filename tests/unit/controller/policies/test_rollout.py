"""A decision is handed out in whole plans: within a budget of bytes, each of what can be prepared together."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastic.controller.policies.rollout import MOST_ACTIONS, Rollout, first_of
from elastic.controller.snapshot import MemoryStats, RequestStats, Snapshot
from elastic.planning.placement import ResourceDemand
from elastic.types import Action, Event, Evict, Migrate, MigrateKV, Release, Replicate, ResizeKV

NEEDS = [ResourceDemand(100)] * 6
a_few = st.sets(st.integers(0, 5), min_size=1).map(lambda layers: tuple(sorted(layers)))
places = st.sampled_from("bc")
actions = st.lists(
    st.builds(Migrate, a_few, places)
    | st.builds(MigrateKV, a_few, places)
    | st.builds(Replicate, a_few, places)
    | st.builds(Evict, a_few, places)
    | st.builds(Release, a_few)
    | st.builds(ResizeKV, places, st.just(7)),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize(
    ("asked", "now", "later"),
    [
        ((Migrate((1, 2), "b"), MigrateKV((1, 2), "b")), 2, ()),
        ((Replicate((0,), "b"), Replicate((1,), "c")), 2, ()),
        ((Replicate((0,), "b"), Replicate((0,), "c")), 1, (Replicate((0,), "c"),)),  # a layer twice
        ((Evict((0,), "b"), Evict((1,), "c"), Release((2,))), 3, ()),
        ((Evict((0,), "b"), Replicate((1,), "b")), 1, (Replicate((1,), "b"),)),  # room that is not there yet
        ((Replicate((0, 1, 2, 3), "b"), Evict((5,), "b")), 1, (Replicate((3,), "b"), Evict((5,), "b"))),
        (
            (Migrate((0, 1, 2, 3), "b"), MigrateKV((0, 1, 2, 3), "b")),
            2,
            (Migrate((3,), "b"), MigrateKV((3,), "b")),
        ),
    ],
)
def test_what_goes_together(asked: tuple[Action, ...], now: int, later: tuple[Action, ...]) -> None:
    first, rest = first_of(asked, NEEDS, most_bytes=300)
    assert (len(first), rest) == (now, later)


@given(actions, st.integers(1, 700))
@example([MigrateKV((0,), "b"), Migrate((0, 1), "b"), MigrateKV((0,), "b")], 100)  # a cache that moved in this plan
def test_all_is_handed_out_and_no_plan_is_too_large(wanted: list[Action], most: int) -> None:
    left: tuple[Action, ...] = tuple(wanted)
    done: list[Action] = []
    while left:
        now, left = first_of(left, NEEDS, most)
        assert 1 <= len(now) <= MOST_ACTIONS + 1
        copied = [one for one in now if isinstance(one, Migrate | Replicate)]
        layers = [layer for one in copied for layer in one.layers]
        assert 100 * len(layers) <= most or len(layers) == 1
        for kinds in ((Migrate, Replicate, Evict, Release), (MigrateKV,)):
            moved = Counter(i for one in now if isinstance(one, kinds) for i in one.layers)
            assert not moved or max(moved.values()) == 1
        gives = [i for i, one in enumerate(now) if isinstance(one, Evict | Release)]
        takes = [i for i, one in enumerate(now) if isinstance(one, Migrate | Replicate)]
        assert not gives or not takes or max(takes) < min(gives)
        done += now
    assert in_steps(done) == in_steps(wanted)


def in_steps(found: list[Action]) -> Counter[Action]:
    """Each action as one of each layer."""
    return Counter(
        replace(one, layers=(i,)) if not isinstance(one, ResizeKV) else one
        for one in found
        for i in getattr(one, "layers", (0,))
    )


def seen(*done: Action, busy: bool = False) -> Snapshot:
    events = tuple(Event(i, one, 0.0, "", 0, 0, 0.0, 0.0, 0.0, True, "applied") for i, one in enumerate(done))
    return Snapshot(10.0, RequestStats(), MemoryStats(0, 1, 1), ("float32",) * 6, busy, events=events)


def test_a_plan_that_failed_is_followed_by_plans_of_one_action() -> None:
    """Of several it is not known which could not be done."""
    both = (Evict((0,), "b"), Evict((1,), "c"))
    asked = Rollout().issue(both, seen(), NEEDS, 1000)
    assert asked.issued == both
    assert asked.with_outcome(seen(busy=True), 5.0) == asked
    assert asked.with_outcome(seen(*both), 5.0).failures == 0
    failed = asked.with_outcome(seen(both[0]), 5.0)
    assert (failed.failures, failed.refused) == (1, ())
    alone = failed.issue(both, seen(), NEEDS, 1000)
    assert (alone.issued, alone.remaining) == (both[:1], both[1:])
    refused = alone.with_outcome(seen(), 5.0)
    assert refused.refuses(both[0], 29.0)
    assert not refused.refuses(both[0], 30.0)
    assert not refused.refuses(both[1], 10.0)
    assert refused.remaining == ()


def test_a_layer_larger_than_the_budget_goes_alone() -> None:
    one, two = Replicate((0,), "b"), Replicate((1,), "c")
    assert first_of((one, two), NEEDS, most_bytes=1) == ((one,), (two,))
