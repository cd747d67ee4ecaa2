"""The scheduler's decisions one by one: who can hold a request, what becomes one for it, and when that parts again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic.config import Lengths
from elastic.controller.policies.lengths.candidates import InstanceDraft, best_merger, lower_degree
from elastic.controller.policies.lengths.policy import (
    MOST_PASSED,
    TRIES,
    LengthPlan,
    LengthPolicy,
    LengthState,
    ScaleDown,
    ScaleUp,
)
from elastic.controller.policies.lengths.snapshot import (
    InstanceReading,
    LengthSnapshot,
    LiveTokens,
    WaitingRequest,
    tokens_to_end,
)

CAPACITY = {1: 1000, 2: 3000, 4: 8000}


def instance(
    name: str, *live: tuple[int, int] | int, ranks: str = "", host: str = "h", pending: float | None = None, **more: Any
) -> InstanceReading:
    """One of as many ranks as letters; a live request that is a number has all its KV."""
    kv = tuple(LiveTokens(*(one if isinstance(one, tuple) else (one, 0))) for one in live)
    work = float(sum(each.most for each in kv)) if pending is None else pending
    return InstanceReading(name, host, tuple(ranks or name), more.pop("capacity", CAPACITY), kv, work, **more)


def waits(name: str, tokens: int, since_s: float = 0.0) -> WaitingRequest:
    return WaitingRequest(name, LiveTokens(tokens, 0), since_s)


class Run:
    """Decides again and again with the memory of the last time."""

    def __init__(self, **settings: Any) -> None:
        self.policy = LengthPolicy(Lengths(**settings))
        self.state: LengthState | None = None

    def at(self, at_s: float, instances: list[InstanceReading], *waiting: WaitingRequest) -> LengthPlan:
        plan = self.policy.decide(LengthSnapshot(at_s, tuple(instances), waiting), self.state)
        self.state = plan.state
        return plan


def decide(instances: list[InstanceReading], *waiting: WaitingRequest, **settings: Any) -> LengthPlan:
    return Run(**settings).at(0.0, instances, *waiting)


def test_what_is_rounded_up_where_a_request_is_alone_counts_for_it_and_not_for_all_together() -> None:
    rounded = LiveTokens(900, 0, 150)
    plan = decide([instance("a"), instance("b")], WaitingRequest("w", rounded, 0.0))
    assert plan.ups == (ScaleUp(("a", "b"), 2, "w"),), "1050 of 1000"
    some = (LiveTokens(900, 0, 90), LiveTokens(900, 0, 90))
    large = replace(instance("a", ranks="ab"), live=some)
    assert lower_degree(large) == 1, "each fits one"
    assert lower_degree(replace(large, live=(rounded,))) is None
    assert InstanceDraft(replace(instance("a"), live=(LiveTokens(500, 0, 200),))).holds(LiveTokens(450, 0, 200))
    assert tokens_to_end(some) == 1800


def test_the_bankers_sum_is_what_all_need_to_end_one_after_another() -> None:
    assert tokens_to_end([]) == 0
    assert tokens_to_end([LiveTokens(10, 5)]) == 15
    assert tokens_to_end([LiveTokens(10, 5), LiveTokens(20, 12)]) == 35, "the second begins with what the first gives"
    assert tokens_to_end([LiveTokens(10, 5), LiveTokens(20, 40)]) == 60


def test_a_request_goes_to_the_least_loaded_instance() -> None:
    instances = [instance("a", 300), instance("b", 200), instance("c", 950)]
    assert decide(instances, waits("r", 100)).routes == (("r", "b"),)
    assert decide(instances, waits("r", 100), waits("s", 100), waits("t", 100)).routes == (
        ("r", "b"),
        ("s", "a"),
        ("t", "b"),
    ), "what was sent counts"


def test_load_is_time_not_tokens() -> None:
    fast = instance("a", 400, rate=10.0)
    assert decide([fast, instance("b", 300)], waits("r", 100)).routes == (("r", "a"),)


def test_a_request_waits_for_the_least_loaded_instance_if_that_is_full() -> None:
    plan = decide([instance("a", 150), instance("b", 950, pending=100)], waits("r", 100), waits("s", 100))
    assert (plan.routes, plan.state.targets) == ((("s", "a"),), {"r": frozenset("b")})


def test_nothing_becomes_one_for_a_request_that_only_has_to_wait() -> None:
    plan = decide([instance("a", 950), instance("b", 980)], waits("r", 500), most_ranks=2)
    assert (plan.routes, plan.ups, plan.refused) == ((), (), ())
    assert plan.reason == "requests wait for room"


def test_a_long_request_has_the_least_loaded_of_equal_degree_become_one() -> None:
    instances = [instance("a", 300), instance("b", 100), instance("c", 200), instance("d", 900)]
    assert decide(instances, waits("r", 2000)).ups == (ScaleUp(("b", "c"), 2, "r"),)


def test_two_steps_are_one_decision() -> None:
    instances = [instance(name) for name in "abcdefgh"]
    (up,) = decide(instances, waits("r", 5000)).ups
    assert (up.degree, len(up.instances)) == (4, 4)


def test_the_step_is_the_least_factor() -> None:
    (up,) = decide([instance(name) for name in "abcd"], waits("r", 2000), step=4).ups
    assert up.degree == 4


def test_an_instance_whose_half_is_no_degree_is_needed_by_long_requests_alone() -> None:
    run, steps = Run(dwell_s=1.0, step=4), {1: 1000, 4: 8000}
    assert run.at(0.0, [instance("abcd", 5000, 300, capacity=steps)]).downs == ()
    assert run.at(0.5, [instance("abcd", 300, capacity=steps)], waits("short", 200)).routes == (("short", "abcd"),)
    assert run.at(1.0, [instance("abcd", 300, 200, capacity=steps)]).downs == (ScaleDown("abcd", 1),)


def test_instances_of_several_hosts_do_not_become_one() -> None:
    apart = [instance("a", host="x"), instance("b", host="y"), instance("c", 500, host="y")]
    assert decide(apart, waits("r", 2000)).ups == (ScaleUp(("b", "c"), 2, "r"),)
    plan = decide(apart[:2], waits("r", 2000))
    assert (plan.ups, plan.refused) == ((), ("r",))


def test_what_no_degree_holds_is_refused() -> None:
    instances = [instance(name) for name in "abcdefgh"]
    assert decide(instances, waits("r", 8001), waits("s", 100)).refused == ("r",)
    assert decide(instances, waits("r", 5000), most_ranks=2).refused == ("r",)


def test_of_ranks_with_unlike_memory_those_become_one_that_hold_the_request() -> None:
    small, large = {1: 500, 2: 1600, 4: 4500}, CAPACITY
    a, b = instance("a", capacity=small), instance("b", capacity=small)
    c, d = instance("c", pending=9.0, capacity=large), instance("d", pending=9.0, capacity=large)
    assert decide([a, b, c, d], waits("r", 1600)).ups == (ScaleUp(("a", "b"), 2, "r"),)
    assert decide([a, b, c, d], waits("r", 3000)).ups == (ScaleUp(("c", "d"), 2, "r"),)
    assert decide([a, b, c], waits("r", 1600)).refused == ()
    assert decide([a, b, c], waits("r", 1601)).refused == ("r",), "no two hold it"
    assert decide([a, b, c, d], waits("r", 4500)).ups[0].degree == 4
    assert decide([a, b, c, d], waits("r", 4501)).refused == ("r",), "nor do all four"
    pair = instance("cd", 2900, capacity=large)
    assert decide([a, b, pair], waits("r", 3000)).refused == (), "it waits for room"


def test_unlike_instances_become_one_where_no_equal_ones_can() -> None:
    plan = decide([instance("ab", 1500), instance("c"), instance("d")], waits("r", 5000))
    assert {frozenset(up.instances) for up in plan.ups} == {frozenset({"ab", "c", "d"})}


def test_instances_that_are_too_full_take_nothing_more_until_they_can_become_one() -> None:
    run = Run()
    full = [instance("a", 900), instance("b", 900)]
    plan = run.at(0.0, full, waits("long", 2000), waits("short", 50, 0.1))
    assert (plan.routes, plan.ups) == ((), ())
    assert plan.reason == "a request waits for instances to become one"
    plan = run.at(1.0, [instance("a", 900), instance("b")], waits("long", 2000), waits("short", 50, 0.1))
    assert (plan.routes, plan.ups) == ((), (ScaleUp(("a", "b"), 2, "long"),))
    busy = [instance("a", 900, busy=True), instance("b", busy=True)]
    assert run.at(3.0, busy, waits("long", 2000), waits("short", 50, 0.1)).ups == ()
    plan = run.at(4.0, [instance("ab", 900)], waits("long", 2000), waits("short", 50, 0.1))
    assert plan.routes == (("long", "ab"), ("short", "ab"))


def test_what_was_asked_for_and_did_not_come_is_asked_for_again_after_a_while() -> None:
    run, pair = Run(cooldown_s=1.0), [instance("a"), instance("b")]
    asked = [bool(run.at(tick / 2, pair, waits("r", 2000)).ups) for tick in range(5)]
    assert asked == [True, False, True, False, True]


def test_an_instance_whose_change_was_stopped_on_its_way_is_asked_for_the_rest_and_has_what_it_has() -> None:
    run, stopped = Run(cooldown_s=1.0), instance("ab", capacity={**CAPACITY, 2: 1500}, whole=3000)
    plan = run.at(0.0, [stopped], waits("r", 2000), waits("s", 1200))
    assert (plan.routes, plan.ups, plan.refused) == ((), (ScaleUp(("ab",), 2, "r"),), ())
    assert [bool(run.at(tick / 2, [stopped], waits("r", 2000)).ups) for tick in (1, 2, 3)] == [False, True, False]
    assert run.at(2.0, [instance("ab")], waits("r", 2000)).routes == (("r", "ab"),)
    assert decide([stopped], waits("s", 1200)).routes == (("s", "ab"),)


def test_further_long_requests_go_to_instances_that_are_large_already() -> None:
    instances = [instance("abcd", 4500, pending=9e9), instance("e"), instance("f"), instance("g"), instance("h")]
    plan = decide(instances, waits("r", 3500))
    assert (plan.routes, plan.ups) == ((("r", "abcd"),), ())


def test_long_requests_come_together_so_that_other_instances_can_part() -> None:
    instances = [instance("abcd", 4500), instance("efgh", 100)]
    assert decide(instances, waits("r", 3100)).routes == (("r", "abcd"),)


def test_several_long_requests_wait_for_instances_that_become_one_for_the_first() -> None:
    run, instances = Run(), [instance(name) for name in "abcdefgh"]
    plan = run.at(0.0, instances, waits("r", 3500), waits("s", 3500))
    assert [up.degree for up in plan.ups] == [4]
    assert set(plan.state.targets) == {"r", "s"}


def test_a_long_request_waits_for_room_before_others_become_one_for_it() -> None:
    run = Run(wait_s=10.0)
    instances = [instance("abcd", 7000), *(instance(name) for name in "efgh")]
    assert run.at(9.0, instances, waits("r", 5000)).ups == ()
    (up,) = run.at(10.0, instances, waits("r", 5000)).ups
    assert set(up.instances) == {"e", "f", "g", "h"}


def test_a_large_instance_takes_no_more_short_requests_than_its_parts_could_hold() -> None:
    instances = [instance("ab", 1001, 900, 400, pending=0.0), instance("c", 950)]
    assert decide(instances, waits("r", 600)).routes == (("r", "ab"),)
    assert decide(instances, waits("r", 601)).routes == ()


def test_a_request_that_waits_for_room_is_not_passed_there() -> None:
    run = Run()
    instances = [instance("a", 500), instance("b", 600)]
    for tick in range(5):
        plan = run.at(float(tick), instances, waits("large", 900), waits("small", 100, 0.1))
        assert plan.routes == (("small", "b"),)
    assert run.at(9.0, [instance("a"), instance("b", 700)], waits("large", 900)).routes == (("large", "a"),)


def test_an_instance_parts_when_its_long_requests_have_ended_and_half_is_free() -> None:
    run = Run(dwell_s=5.0)
    assert run.at(0.0, [instance("abcd", 5000, 300)]).downs == ()
    assert run.at(3.0, [instance("abcd", 300)]).downs == (), "not at once"
    assert run.at(4.9, [instance("abcd", 300)]).downs == ()
    assert run.at(5.0, [instance("abcd", 300)]).downs == (ScaleDown("abcd", 1),)


def test_an_instance_does_not_part_into_ones_that_could_not_hold_its_requests() -> None:
    assert lower_degree(instance("abcd", 600, 600, 600, 600)) == 1
    assert lower_degree(instance("abcd", 600, 600, 600, 600, 600)) == 2
    assert lower_degree(instance("abcd", (100, 900), (100, 901))) == 2
    assert lower_degree(instance("abcd", 3001)) is None
    assert decide([instance("abcd", 2500)], dwell_s=0.0).downs == (ScaleDown("abcd", 2),)
    assert decide([instance("abcd", 2500)], dwell_s=0.0, free_to_shrink=0.7).downs == (), "less is free"


def test_an_instance_parts_only_when_each_rank_holds_the_requests_that_it_began() -> None:
    """They are not moved: a part that waited for them would keep other instances from changing."""
    homes = [LiveTokens(600, 0, 0, home) for home in "aabc"]
    large = replace(instance("abcd"), live=tuple(homes))
    assert lower_degree(large) == 2, "1200 at a, 600 at b: two hold 3000, a alone 1000"
    assert decide([large], dwell_s=0.0).downs == (ScaleDown("abcd", 2),)
    assert lower_degree(replace(large, live=tuple(homes[1:]))) == 1
    assert lower_degree(replace(large, live=(*homes[1:], LiveTokens(400, 0)))) == 1, "who has not begun goes to d"
    assert lower_degree(replace(instance("ab"), live=tuple(homes[:2]))) is None
    assert decide([replace(instance("ab"), live=tuple(homes[:2]))], dwell_s=0.0).closed == ("ab",), "so that they end"


def test_an_instance_of_a_pipeline_becomes_another_only_with_all_of_it() -> None:
    pipeline = [instance("a", partners=("b",)), instance("b", partners=("a",))]
    one, two = instance("c", 10), instance("d", 10)
    kv = LiveTokens(1500, 0)

    def merged(*readings: InstanceReading) -> list[str] | None:
        found = best_merger([InstanceDraft(reading) for reading in readings], kv, 2, 4)
        return None if found is None else sorted(rank for member in found for rank in member.reading.ranks)

    assert merged(*pipeline, one) == ["a", "b"]
    assert merged(pipeline[0], one) is None
    assert merged(pipeline[0], one, two) == ["c", "d"]
    assert merged(instance("a", 900, partners=("b",)), instance("b", 900, partners=("a",)), one, two) == ["c", "d"]
    assert lower_degree(instance("ab", 10)) == 1
    assert lower_degree(instance("ab", 10, partners=("c",))) is None, "what it has dropped returns first"


def test_nobody_waits_for_ranks_that_looked_like_one_instance_while_layers_changed_their_rank() -> None:
    """Five are none that could ever be; with all of them taken for that, nothing would be sent anywhere."""
    run = Run()
    plan = run.at(0.0, [instance("abcde", 1000, capacity={**CAPACITY, 5: 1000})], waits("r", 500), waits("s", 10))
    assert plan.state.targets == {"r": frozenset("abcde")}
    pipeline = [instance("abcd", partners=("e",)), instance("e", partners=tuple("abcd"))]
    plan = run.at(1.0, pipeline, waits("r", 500), waits("s", 10))
    assert [request for request, _ in plan.routes] == ["r", "s"]


def test_nobody_waits_for_instances_of_which_one_has_come_to_compute_layers_with_others() -> None:
    """They become one only with those others, so asking for the two by themselves would fail again and again."""
    run, long = Run(), waits("r", 1200)
    assert run.at(0.0, [instance("a"), instance("b")], long).ups == (ScaleUp(("a", "b"), 2, "r"),)
    roomy = {**CAPACITY, 1: 1250}
    dropped = [instance("a"), *(instance(x, partners=(y,), capacity=roomy) for x, y in ("bc", "cb"))]
    assert run.at(100.0, dropped, long).routes == (("r", "b"),)


FULL = (900, 900, 900, 900, 900)  # five: one more than four instances hold


def test_an_instance_that_cannot_part_yet_takes_no_short_requests_but_not_for_ever() -> None:
    run = Run(dwell_s=1.0, patience_s=30.0, free_to_shrink=0.9)
    run.at(0.0, [instance("abcd", *FULL)])
    assert run.at(1.0, [instance("abcd", *FULL)]).closed == ("abcd",)
    plan = run.at(2.0, [instance("abcd", 100)], waits("r", 100, 2.0))
    assert plan.routes == ()
    assert run.at(30.9, [instance("abcd", *FULL)]).closed == ("abcd",)
    assert run.at(31.0, [instance("abcd", *FULL)]).closed == ()
    assert run.at(60.9, [instance("abcd", *FULL)]).closed == (), "open for as long"
    assert run.at(61.0, [instance("abcd", *FULL)]).closed == ("abcd",)


def test_an_instance_opens_when_the_queue_grows() -> None:
    run = Run(dwell_s=1.0, queue_high_s=2.0, free_to_shrink=0.9)
    run.at(0.0, [instance("abcd", *FULL)])
    assert run.at(1.0, [instance("abcd", *FULL)]).closed == ("abcd",)
    assert run.at(3.9, [instance("abcd", *FULL)], waits("r", 100, 2.0)).closed == ("abcd",)
    assert run.at(4.0, [instance("abcd", *FULL)], waits("r", 100, 2.0)).closed == ()


def test_a_long_request_that_comes_meanwhile_opens_it() -> None:
    run = Run(dwell_s=1.0, free_to_shrink=0.9)
    run.at(0.0, [instance("abcd", 900, 900)])
    assert run.at(1.0, [instance("abcd", *FULL)]).closed == ("abcd",)
    plan = run.at(2.0, [instance("abcd", 900, 900)], waits("long", 5000, 2.0))
    assert (plan.routes, plan.closed, plan.downs) == ((("long", "abcd"),), (), ())


def test_the_dwell_doubles_when_instances_part_too_early() -> None:
    run = Run(dwell_s=1.0)
    whole, parts = [instance("ab")], [instance("a"), instance("b")]
    dwells = []
    now = 0.0
    for _ in range(5):
        assert run.at(now, parts, waits("long", 2000, now)).ups
        began = now = now + 1.0
        while not run.at(now, whole).downs:
            now += 0.5
        dwells.append(now - began)
        now += 1.0
    assert dwells == [1.0, 2.0, 4.0, 8.0, 8.0]


@pytest.mark.parametrize("waiting", [0, 2000])
def test_a_long_queue_is_looked_through_in_order(waiting: int) -> None:
    queue = [waits(f"r{number}", 400, float(number)) for number in range(waiting)]
    plan = decide([instance("a"), instance("b")], *queue)
    assert [name for name, _ in plan.routes] == [f"r{number}" for number in range(min(4, waiting))]


@pytest.mark.parametrize("waiting", [1000, 5000])
def test_what_a_tick_looks_at_does_not_grow_with_the_queue(waiting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    monkeypatch.setattr(InstanceDraft, "holds", lambda candidate, kv: looked.append(kv) or False)
    queue = [waits(f"r{number}", 100 + number % 400) for number in range(waiting)]
    plan = decide([instance(name, 900) for name in "abcd"], *queue, waits("long", 2500))
    assert len(looked) <= 2 * MOST_PASSED
    assert [up.request for up in plan.ups] == ["long"], "who needs several ranks together is not passed over"


def test_ranks_that_do_not_become_one_serve_again_while_others_are_asked() -> None:
    """Nobody says why a change comes to nothing: a rank that is short of memory, say."""
    run = Run(cooldown_s=1.0, patience_s=30.0)
    four = [instance(name) for name in "abcd"]
    long, asked = waits("long", 2500), list[tuple[float, tuple[str, ...]]]()
    for tenth in range(1000):
        plan = run.at(tenth / 10, four, long)
        asked += [(tenth / 10, up.instances) for up in plan.ups]
    first, second = ("a", "b"), ("c", "d")
    assert [names for _, names in asked[: 2 * TRIES]] == [first] * TRIES + [second] * TRIES
    assert asked[TRIES][0] == asked[TRIES - 1][0] + 1.0, "others at once"
    again = next(at_s for at_s, names in asked[TRIES:] if names == first)
    assert again >= asked[TRIES][0] + 30.0, "the first when they had served for a while"


def test_ranks_that_failed_to_become_one_take_short_requests_meanwhile() -> None:
    run, both = Run(cooldown_s=1.0, patience_s=30.0), [instance("a"), instance("b")]
    long, short = waits("long", 2500), waits("short", 100)
    for second in range(TRIES):
        assert run.at(float(second), both, long, short).ups
        assert not run.at(second + 0.5, both, long, short).routes, "they wait for each other"
    assert run.at(float(TRIES), both, long, short).routes == (("short", "a"),)
    assert not run.at(TRIES + 29.0, both, long).ups
    assert run.at(TRIES + 31.0, both, long).ups == (ScaleUp(("a", "b"), 2, "long"),)


def test_ranks_that_became_one_late_are_not_taken_for_failed() -> None:
    run, both, long = Run(cooldown_s=1.0), [instance("a"), instance("b")], waits("long", 2500)
    for second in range(TRIES):
        assert run.at(float(second), both, long).ups
    changing = [replace(each, busy=True) for each in both]
    assert not run.at(TRIES + 5.0, changing, long).routes
    assert run.at(TRIES + 6.0, [instance("a", ranks="ab")], long).routes == (("long", "a"),)
