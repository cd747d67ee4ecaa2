"""Models that lend each other places: tables of decisions, and simulated processes in which anything happens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from elastic import SLO, Scale
from elastic.controller.decision import Plan
from elastic.controller.policies.action_costs import ActionCosts
from elastic.controller.policies.arbiter import Arbiter, ArbiterState
from elastic.controller.policies.peer_group import SILENT_S, PeerGroup, PeerModel
from elastic.controller.policies.precision_steps import LayerSize
from elastic.planning.placement import ResourceDemand
from elastic.types import Migrate, Replicate, Swap
from support.planning.simulated_peers import EAGER, LAYERS, NBYTES, World, quick


def pair(a: int = 1000, b: int = 1000, scale: Scale = EAGER, **others: int) -> World:
    """Two models, each at home in a place of its own."""
    world = World(a=a, b=b, **others)
    world.wrap("A", "a", scale)
    world.wrap("B", "b", scale)
    return world


def test_in_ease_each_has_replicas_at_the_others_place() -> None:
    world = pair()
    world.run(40)
    assert world.guests() == {("A", "b"): 4, ("B", "a"): 4}


def test_a_third_place_is_shared_in_halves() -> None:
    """With room for four layers; at home there is none."""
    world = pair(a=450, b=450, c=500)
    world.run(40)
    assert world.guests() == {("A", "c"): 2, ("B", "c"): 2}


def test_one_that_comes_later_is_given_its_part() -> None:
    world = World(a=450, b=450, c=500)
    world.wrap("A", "a", places="ac")
    world.run(40)
    assert world.guests() == {("A", "c"): 4}
    world.wrap("B", "b", places="bc")
    plans = world.run(60)
    assert world.guests() == {("A", "c"): 2, ("B", "c"): 2}
    assert any(plan.reason == "others give room back" for plan in plans["B"])
    assert any("another model of the group needs the room" in plan.reason for plan in plans["A"])
    assert not any(plan.actions or plan.asks for one in world.run(40).values() for plan in one)


def test_guests_leave_before_a_model_moves_anything_of_its_own() -> None:
    world = pair(b=2000)  # A could go there
    world.lenders["A"].running = 1
    world.run(40)
    assert world.guests() == {("B", "a"): 4}
    world.lenders["A"].kv = 450
    plans = world.run(8)
    assert world.lenders["B"].replicas("a") == []
    assert not any(plan.actions for plan in plans["A"])
    (first,) = {plan.reason for plan in plans["A"] if plan.asks}
    assert first == "the KV cache of a is nearly full: guests leave first"
    world.lenders["A"].kv = 550  # now nobody is left who could
    assert any(isinstance(action, Migrate) for plan in world.run(8)["A"] for action in plan.actions)


def test_no_more_guests_leave_than_must() -> None:
    world = pair()
    world.lenders["A"].running = 1
    world.run(40)
    world.lenders["A"].kv = 190
    world.run(10)
    assert 0 < len(world.lenders["B"].replicas("a")) < 4


@pytest.mark.slow
def test_while_one_is_short_the_other_takes_no_room_and_returns_after_it() -> None:
    world = pair(scale=quick(dwell_s=2.0))
    world.lenders["A"].running = 1
    world.run(80)
    assert len(world.lenders["B"].replicas("a")) == 4
    world.lenders["A"].kv = 450
    world.run(5)
    assert world.lenders["B"].replicas("a") == []
    world.lenders["A"].kv = 0
    plans = world.run(5)["B"]
    assert {plan.reason for plan in plans} == {"another model of the group is short, or was not long ago"}
    world.run(80)
    assert len(world.lenders["B"].replicas("a")) == 4


def test_where_guests_do_not_leave_a_model_helps_itself_after_a_while() -> None:
    world = pair(b=2000, scale=quick(patience_s=1.0))
    world.lenders["A"].running = 1
    world.run(40)
    world.lenders["B"].answers = False  # its evictions fail
    world.lenders["A"].kv = 550
    plans = world.run(30)["A"]
    acts = [bool(plan.actions) for plan in plans]
    asks = [bool(plan.asks) for plan in plans]
    assert asks.index(True) < acts.index(True) <= 8
    assert isinstance(plans[acts.index(True)].actions[0], Migrate)


def test_a_model_that_is_silent_is_left_out() -> None:
    world = pair(b=2000)
    world.lenders["A"].running = 1
    world.run(40)
    world.lenders["A"].kv = 550
    world.now += SILENT_S + 1
    plan = world.tick("A")  # B does not tick any more
    assert isinstance(plan.actions[0], Migrate)
    assert not plan.asks


@pytest.mark.parametrize(("silent_s", "guests"), [(30.0, {}), (70.0, {("B", "c"): 4})])
def test_what_a_silent_model_was_doing_is_for_nobody_else_for_a_while(silent_s: float, guests: dict[Any, int]) -> None:
    """Its controller was stopped with replicas on their way to c, and somebody evicted them again."""
    world = World(a=450, b=450, c=550)
    silent, other = world.wrap("A", "a", places="ac"), world.wrap("B", "b", places="bc")
    world.took = 3
    while not world.tick("A").actions:
        world.later()
    for _ in range(4):
        world.later()
    silent.layers = [("a",)] * LAYERS
    world.now += SILENT_S + silent_s
    for _ in range(20):
        world.tick("B")
        world.later()
    assert world.guests() == guests
    assert other.state.pressed == 0


def test_a_model_that_leaves_is_planned_with_no_more() -> None:
    world = pair(a=450, b=450, c=500)
    world.run(40)
    assert world.guests()["A", "c"] == 2
    world.lenders.pop("B").member.leave()
    world.run(40)
    assert world.guests()["A", "c"] == 4


def test_speed_that_is_short_takes_over_what_gains_more_together() -> None:
    """In halves of the third place neither is fast; all of it for one is worth more. Afterwards each has its part."""
    world = World(a=450, b=450, c=500)
    slow = world.wrap("A", "a", EAGER, SLO(tpot_s=0.3))
    world.wrap("B", "b")
    world.run(40)
    assert world.guests() == {("A", "c"): 2, ("B", "c"): 2}
    slow.slow = True
    plans = world.run(2)["A"]
    assert world.guests() == {("A", "c"): 4}
    assert any(plan.reason == "SLOs are missed: others give room back" for plan in plans)
    assert any(plan.reason.startswith("SLOs are missed: room for replicas") for plan in plans)
    slow.slow = False
    world.run(40)
    assert world.guests() == {("A", "c"): 2, ("B", "c"): 2}


def test_what_is_lost_elsewhere_is_weighed() -> None:
    """B has all of the third place, and would lose what A wins: nothing goes over, A has algorithm 2 only."""
    world = World(a=450, b=450, c=500)
    world.wrap("B", "b", places="bc")
    world.run(40)
    assert world.guests() == {("B", "c"): 4}
    world.wrap("A", "a", EAGER, SLO(tpot_s=0.3), slow=True)
    plans = world.run(20)
    assert not any(plan.asks for plan in plans["A"])
    assert world.guests() == {("B", "c"): 4}


def test_guests_of_the_least_busy_model_leave_first() -> None:
    world = World(a=1400, b=450, c=450)
    world.wrap("A", "a", running=1)
    world.wrap("B", "b", running=8)
    world.wrap("C", "c", running=4)
    world.run(60)
    assert world.lenders["B"].replicas("a")
    assert world.lenders["C"].replicas("a")
    world.lenders["A"].kv = world.free("a") - 10
    plan = world.tick("A")
    assert plan.asks[0].model == world.lenders["C"].name


def test_places_that_only_one_has() -> None:
    world = World(a=450, b=450, c=500, d=500)
    world.wrap("A", "a", places="ac")
    world.wrap("B", "b", places="bcd")
    world.run(60)
    assert world.guests()["A", "c"] >= 2
    assert world.guests()["B", "d"] == 4


def test_nothing_is_done_under_an_arbiter_before_guests_have_left() -> None:
    class Swaps:
        def decide(self, snapshot: object, state: object) -> Plan:
            return Plan((Swap((0,), "int4"),), "swap", "swapped")

    world = pair()
    world.lenders["A"].running = 1
    world.run(40)
    one = world.lenders["A"]
    sizes = [LayerSize("float32", NBYTES, {"int4": 20})] * 4
    arbiter = Arbiter([Swaps(), one.member.policy], sizes, [ResourceDemand(NBYTES)] * 4, one.member._model)
    one.member.policy, one.state = arbiter, ArbiterState((None, one.state), ActionCosts())
    one.kv = 195
    plan = world.tick("A")
    assert plan.asks
    assert not plan.actions
    assert plan.short
    assert plan.state.states[0] == "swapped"  # what it says where an action is under way
    world.later()
    world.tick("B")
    world.later()
    assert len(world.lenders["B"].replicas("a")) < 4


def test_groups_go_by_name_and_die_with_their_members() -> None:
    first = PeerGroup.named("one")
    member = PeerModel(first, EAGER, [], lambda rows: None)  # type: ignore[arg-type, return-value]
    assert PeerGroup.named("one") is first
    assert PeerGroup.named("two") is not first
    assert member.name == "1"
    known = id(first)
    del first, member
    again = PeerGroup.named("one")
    assert id(again) != known or again.next_name() == "1"


# -- anything may happen

steps = st.lists(
    st.one_of(
        st.tuples(st.just("tick"), st.sampled_from("ABC")),
        st.tuples(st.just("tick"), st.sampled_from("ABC")),
        st.tuples(st.just("later"), st.sampled_from([0.2, 0.2, 1.0, 7.0])),
        st.tuples(st.just("load"), st.sampled_from("ABC"), st.integers(0, 500), st.integers(0, 12)),
        st.tuples(st.just("fail"), st.sampled_from("ABC"), st.booleans()),
        st.tuples(st.just("slow"), st.sampled_from("ABC"), st.booleans()),
        st.tuples(st.just("leave"), st.sampled_from("ABC")),
    ),
    min_size=40,
    max_size=160,
)


SILENT = [
    ("leave", "A"),
    *[("tick", c) if c in "BC" else ("later", 7.0 if c == "7" else 0.2) for c in ".CCCCB.CBB.CBBBC7B7C"],
]
"""A model is silent for long with an action under way, whose bytes are not for others."""


@pytest.mark.parametrize("examples", [15, pytest.param(200, marks=pytest.mark.long)])
@pytest.mark.slow
def test_no_two_models_are_ever_planned_into_the_same_bytes(examples: int) -> None:
    @settings(deadline=None, max_examples=examples, suppress_health_check=[HealthCheck.too_slow])
    @example(SILENT, 1, [500] * 4)
    @given(steps, st.integers(0, 4), st.lists(st.integers(500, 1500), min_size=4, max_size=4))
    def plan(script: list[tuple[str, ...]], took: int, totals: list[int]) -> None:
        run_script(script, took, totals)

    plan()


def run_script(script: list[tuple[str, ...]], took: int, totals: list[int]) -> None:
    world = World(**dict(zip("abcd", totals, strict=True)))
    world.took = took
    for name in "ABC":
        world.wrap(name, name.lower(), quick(offload=False), SLO(tpot_s=0.3))
    for step, *arguments in script:
        if step == "later":
            world.later(float(arguments[0]))
            continue
        name = arguments[0]
        if name not in world.lenders:
            continue
        one = world.lenders[name]
        if step == "load":
            before = one.kv
            one.kv, one.running = int(arguments[1]), int(arguments[2])
            if min(map(world.free, world.totals)) < 0:  # no request is let in without pages
                one.kv = before
        elif step == "fail":
            one.answers = not arguments[1]
        elif step == "slow":
            one.slow = bool(arguments[1])
        elif step == "leave" and len(world.lenders) > 2:
            world.lenders.pop(name).member.leave()
        elif step == "tick":
            before_free = {place: world.free(place, asked=True) for place in world.totals}
            plan = world.tick(name)
            assert not (plan.actions and plan.asks)
            for place, total in world.totals.items():
                after = world.free(place, asked=True)
                if after < before_free[place]:  # margins are kept by whatever comes
                    assert after >= 0.1 * total - 1, plan
            for ask in plan.asks:
                assert ask.model != one.name
            came = [a for a in plan.actions if isinstance(a, Replicate | Migrate)]
            assert all(action.place in world.totals for action in came)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 6))])
@pytest.mark.slow
def test_it_does_not_oscillate(seed: int) -> None:
    """Two loads that come and go by turns, with noise, for two minutes: what moves follows them, and not more often."""
    import random

    choose = random.Random(seed)
    world = pair(a=1000, b=1000, c=500, scale=Scale(group="x", dwell_s=5.0, vacancy_ticks=3))
    moves, turns = 0, 0
    for tick in range(600):
        heavy = "AB"[tick // 150 % 2]
        turns += tick % 150 == 0
        for name, one in world.lenders.items():
            one.kv = round((400 if name == heavy else 60) * choose.gauss(1, 0.05))
            one.running = choose.choice([7, 8, 9]) if name == heavy else choose.choice([2, 3])
        for name in world.lenders:
            moves += bool(world.tick(name).actions)
        world.later()
    assert 2 <= moves <= 12 * turns
