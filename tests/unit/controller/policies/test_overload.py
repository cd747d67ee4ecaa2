from __future__ import annotations

import itertools
import pickle
from dataclasses import replace
from typing import Any

import pytest

from elastic.config import Overload
from elastic.controller.fleet_snapshot import FleetSnapshot, GroupReading, MemberReading, request_bytes
from elastic.controller.policies.overload import OverloadPlan, OverloadPolicy, OverloadState
from elastic.errors import ConfigError
from elastic.planning.arrangement.stages import Held

LAYERS, EACH, BASE = 12, 10, 1000
ALL = frozenset(range(LAYERS))
LOW, HIGH = frozenset(range(6)), frozenset(range(6, 12))
SETTINGS = Overload(margin=0.0, partial=True)
TICK = SETTINGS.tick_s


def instance(name: str, layers: frozenset[int] = ALL, home: int = 0) -> MemberReading:
    return MemberReading(Held(name, layers), BASE, home)


def alone(name: str, used: int = 100, **fields: Any) -> GroupReading:
    return GroupReading((instance(name, home=used),), BASE, used, running=1 if used else 0, **fields)


def hot(name: str, waiting: int = 60) -> GroupReading:
    return alone(name, 980, waiting_bytes=waiting)


def pair(used: int = 100, homes: tuple[int, int] = (50, 50), **fields: Any) -> GroupReading:
    members = instance("a", LOW, homes[0]), instance("b", HIGH, homes[1])
    fields = {"running": 1 if used else 0, **fields}
    return GroupReading(members, 2 * BASE + LAYERS * EACH, used, **fields)


def seen(*groups: GroupReading, at_s: float = 0.0, **fields: Any) -> FleetSnapshot:
    return FleetSnapshot(at_s, groups, (EACH,) * LAYERS, **fields)


def settle(
    policy: OverloadPolicy, snapshot: FleetSnapshot, ticks: int, state: OverloadState | None = None
) -> OverloadPlan:
    """The same again and again, until it acts."""
    for tick in range(ticks):
        plan = policy.decide(replace(snapshot, at_s=snapshot.at_s + tick * TICK), state)
        state = plan.state
        if plan.drops or plan.restores:
            break
    return plan


def test_overload_must_last_and_then_two_instances_drop_as_much_as_is_needed() -> None:
    policy = OverloadPolicy(SETTINGS)
    snapshot = seen(hot("a"), hot("b"))
    plan = settle(policy, snapshot, 2)
    assert not plan.drops
    assert plan.reason == "overload, but not for long yet"
    (drop,) = settle(policy, snapshot, 3).drops
    assert drop.members == ("a", "b")
    assert drop.freed_bytes == 80  # 40 bytes are missing at each
    (whole,) = settle(OverloadPolicy(replace(SETTINGS, partial=False)), snapshot, 3).drops
    assert whole.freed_bytes == LAYERS * EACH


@pytest.mark.parametrize("others", [100, 940])
def test_one_hot_instance_of_eight_takes_one_partner_and_leaves_the_others_alone(others: int) -> None:
    groups = [alone(f"i{number}", others + number) for number in range(8)]
    groups[5] = hot("i5")
    plan = settle(OverloadPolicy(SETTINGS), seen(*groups), 3)
    (drop,) = plan.drops
    assert set(drop.groups) == {5, 0}  # the emptiest of the others
    assert drop.freed_bytes == 40


def test_a_larger_need_takes_more_partners_but_no_more_than_suffice() -> None:
    groups = [alone(f"i{number}") for number in range(8)]
    groups[5] = hot("i5", waiting=20 + 2 * LAYERS * EACH)
    (drop,) = settle(OverloadPolicy(SETTINGS), seen(*groups), 3).drops
    assert set(drop.groups) == {5, 0, 1}
    groups[5] = hot("i5", waiting=20 + 3 * LAYERS * EACH + 1)
    plan = settle(OverloadPolicy(replace(SETTINGS, best_effort=False)), seen(*groups), 3)
    assert not plan.drops
    assert "no drop frees enough" in plan.reason
    assert plan.scale_out == 1


def test_what_no_drop_ends_has_as_much_dropped_as_can_be_and_instances_asked_for() -> None:
    groups = [alone(f"i{number}") for number in range(8)]
    groups[5] = hot("i5", waiting=20 + 3 * LAYERS * EACH + BASE)
    plan = settle(OverloadPolicy(SETTINGS), seen(*groups), 3)
    (drop,) = plan.drops
    assert set(drop.groups) == {5, 0, 1, 2}  # as many stages as there may be
    assert drop.freed_bytes == 3 * LAYERS * EACH
    assert "no drop frees enough: as much is dropped as can be" in plan.reason
    assert plan.scale_out == 1


@pytest.mark.parametrize(("instances", "models"), [(2, 1), (4, 3), (5, 3), (8, 6), (9, 6)])
def test_a_queue_that_no_drop_ends_has_as_much_dropped_as_can_be(instances: int, models: int) -> None:
    """Merged groups have four stages at the most: of nine instances one is left, of five too."""
    groups = [alone(f"i{number}", 960) for number in range(instances)]
    snapshot = seen(*groups, queued_bytes=instances * BASE * 4)
    policy = OverloadPolicy(SETTINGS)
    plan = settle(policy, snapshot, 3)
    assert sum(drop.freed_bytes for drop in plan.drops) == models * LAYERS * EACH
    assert all(len(drop.members) <= SETTINGS.most_stages for drop in plan.drops)
    assert plan.scale_out > 0
    assert not settle(OverloadPolicy(replace(SETTINGS, best_effort=False)), snapshot, 3).drops


def test_where_nothing_is_held_twice_nothing_is_dropped() -> None:
    plan = settle(OverloadPolicy(SETTINGS), seen(pair(2100, waiting_bytes=500)), 9)
    assert not plan.drops
    assert plan.reason == "an instance is overloaded, and no drop frees enough: requests wait for KV"
    assert plan.scale_out == 1


def test_a_queue_at_the_fleet_is_the_shortage_of_all() -> None:
    groups = [alone(f"i{number}", 960 + number) for number in range(4)]
    free = 4 * 40 - 6
    policy = OverloadPolicy(SETTINGS)
    assert not settle(policy, seen(*groups, queued_bytes=free), 9).drops
    plan = settle(policy, seen(*groups, queued_bytes=free + 1), 3)
    assert [drop.groups for drop in plan.drops] == [(3, 2)]  # the fullest two; the others stay as they are
    assert plan.drops[0].freed_bytes == EACH
    policy = OverloadPolicy(replace(SETTINGS, best_effort=False))
    too_much = settle(policy, seen(*groups, queued_bytes=free + 3 * LAYERS * EACH + 1), 9)
    assert not too_much.drops
    assert too_much.scale_out == 1


def test_waiting_below_high_use_counts_after_a_while_only() -> None:
    policy = OverloadPolicy(SETTINGS)
    large = alone("a", 700, waiting_bytes=400, queue_s=0.1), alone("b")
    assert not settle(policy, seen(*large), 9).drops
    late = replace(large[0], queue_s=0.3), large[1]
    assert settle(policy, seen(*late), 3).drops
    idle = replace(late[0], used_bytes=300, waiting_bytes=800), large[1]
    assert not settle(policy, seen(*idle), 9).drops, "below queue_kv they wait for something else"


def test_full_without_anyone_waiting_is_no_overload() -> None:
    assert settle(OverloadPolicy(SETTINGS), seen(alone("a", 1000), alone("b", 1000)), 9).reason == "all is well"


def test_an_overload_that_comes_again_drops_what_two_still_both_hold_before_a_third_joins() -> None:
    members = instance("a", ALL - {11}), instance("b", ALL - {0})
    group = GroupReading(members, 2 * BASE + 20, 2015, waiting_bytes=25, running=9)
    (drop,) = settle(OverloadPolicy(SETTINGS), seen(group, alone("c")), 3).drops
    assert drop.groups == (0,)
    assert drop.freed_bytes == 10 * EACH  # all of it: it was too little before


def test_groups_under_way_or_just_changed_are_left_alone() -> None:
    policy = OverloadPolicy(SETTINGS)
    busy = [replace(hot("a"), busy=True), replace(hot("b"), busy=True)]
    assert not settle(policy, seen(*busy), 9).drops
    first = settle(policy, seen(hot("a"), hot("b")), 3)
    at_s = 3 * TICK
    again = settle(policy, seen(hot("a"), hot("b"), at_s=at_s), 3, first.state)
    assert first.drops
    assert not again.drops


def test_a_drop_that_comes_to_nothing_is_tried_again_less_and_less_often() -> None:
    policy, snapshot, state = OverloadPolicy(SETTINGS), seen(hot("a"), hot("b")), None
    times = []
    for tick in range(600):
        plan = policy.decide(replace(snapshot, at_s=tick * TICK), state)
        state = plan.state
        if plan.drops:
            times.append(tick * TICK)
    waits = [b - a for a, b in itertools.pairwise(times)]
    assert len(waits) >= 4
    assert all(later >= 1.9 * sooner for sooner, later in itertools.pairwise(waits))


def test_a_margin_is_freed_besides_if_that_is_possible_with_as_few_partners() -> None:
    policy = OverloadPolicy(replace(SETTINGS, margin=0.01))
    assert settle(policy, seen(hot("a"), alone("b")), 3).drops[0].freed_bytes == 60
    policy = OverloadPolicy(replace(SETTINGS, margin=0.1))
    assert settle(policy, seen(hot("a"), alone("b")), 3).drops[0].freed_bytes == 40
    margins = settle(policy, seen(alone("a", 960), alone("b", 960), queued_bytes=90), 3)
    assert margins.drops[0].freed_bytes == 10


# -- restores


def dropped_state(policy: OverloadPolicy) -> OverloadState:
    """What is remembered after a drop at 0.2 s that became a pair."""
    plan = settle(policy, seen(hot("a"), hot("b")), 3)
    assert plan.drops
    return plan.state


def test_layers_return_when_the_load_is_low_against_the_capacity_without_a_drop() -> None:
    policy = OverloadPolicy(SETTINGS)
    state = dropped_state(policy)
    high = seen(pair(1001, (500, 501)), at_s=60)
    assert settle(policy, high, 20, state).reason == "the load still needs the dropped layers' memory"
    low = seen(pair(1000, (500, 500)), at_s=60)
    soon = settle(policy, low, 4, state)
    assert not soon.restores
    assert settle(policy, low, 5, state).restores == (("a", "b"),)


def test_layers_do_not_return_where_one_instance_could_not_hold_its_own_requests() -> None:
    policy = OverloadPolicy(SETTINGS)
    assert not settle(policy, seen(pair(1000, (980, 20)), at_s=60), 20, dropped_state(policy)).restores


def test_layers_do_not_return_while_anyone_waits_or_another_group_is_short() -> None:
    policy = OverloadPolicy(SETTINGS)
    state = dropped_state(policy)
    assert not settle(policy, seen(pair(waiting_bytes=5), at_s=60), 20, state).restores
    assert not settle(policy, seen(pair(), at_s=60, queued_bytes=5), 20, state).restores
    hot_third = seen(pair(), replace(hot("c"), busy=True), at_s=60)
    assert not settle(policy, hot_third, 20, state).restores


def test_the_overload_must_have_been_gone_for_a_while_unless_nobody_is_there() -> None:
    policy = OverloadPolicy(SETTINGS)
    state = dropped_state(policy)
    plan = settle(policy, seen(pair(), at_s=1), 10, state)
    assert plan.reason == "the overload has gone, but not for long yet"
    assert settle(policy, seen(pair(), at_s=1), 60, state).restores
    assert settle(policy, seen(pair(0, (0, 0)), at_s=1), 25, state).restores
    assert not settle(policy, seen(pair(0, (0, 0)), at_s=1), 15, state).restores


def test_a_restore_that_came_too_early_doubles_the_dwell() -> None:
    policy = OverloadPolicy(SETTINGS)
    restore = settle(policy, seen(pair(), at_s=60), 9, dropped_state(policy))
    assert restore.restores
    again = settle(policy, seen(hot("a"), hot("b"), at_s=65), 9, restore.state)
    assert again.drops
    assert {state.regrets for state in again.state.groups} == {1}
    assert not settle(policy, seen(pair(), at_s=66), 90, again.state).restores
    assert settle(policy, seen(pair(), at_s=66), 110, again.state).restores
    late = settle(policy, seen(hot("a"), hot("b"), at_s=200), 9, restore.state)
    assert {state.regrets for state in late.state.groups} == {0}


# -- the rest


def test_what_it_remembers_is_small_and_can_be_sent() -> None:
    state = dropped_state(OverloadPolicy())
    assert pickle.loads(pickle.dumps(state)) == state
    assert len(state.groups) == 2


def test_an_empty_fleet_is_well() -> None:
    assert OverloadPolicy().decide(seen(queued_bytes=9)).reason == "all is well"


def test_a_waiting_request_counts_with_the_usual_answer() -> None:
    assert request_bytes(100, 4096, 300, 2) == 800
    assert request_bytes(100, 20, 300, 2) == 240


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_high": 1.5},
        {"restore_below": 0.9},
        {"pressure_ticks": 0},
        {"most_stages": 1},
        {"dwell_s": -1.0},
        {"tick_s": 0},
        {"partial": "yes"},
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        Overload(**fields)
