"""Drops and restores answer overloads soon, and do not chatter: 40 simulated noisy traces, or 200.

An episode is a time of 3 s or more in which the requests would need more KV than two instances have with all layers,
or, where they wait at their instance, than one of these has. It is acted on if within 2 s of its beginning layers are
dropped, or were still. A reversal is a drop after a restore or a restore after a drop; from the beginning of an episode
to that of the next there may be one.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import pytest

from elastic.config import Overload
from elastic.controller.fleet_snapshot import FleetSnapshot
from elastic.controller.policies.overload import OverloadPlan, OverloadPolicy, OverloadState
from support.planning.simulated_fleet import SimulatedFleet
from support.planning.simulated_server import BASE, KINDS, TRACE_TICKS, Arrival, trace

TRACES, SOON, EPISODE_TICKS = 200, 20, 30
FEW = 40
"""Of the traces: as many of each kind."""


@cache
def one_trace(seed: int) -> list[Arrival]:
    return trace(KINDS[seed % 4], seed)


def arrivals(seed: int) -> list[tuple[str, Arrival]]:
    """Two traces of a kind, one for each instance."""
    found = [("i0", one) for one in one_trace(seed)]
    found += [("i1", one) for one in one_trace((seed + 4) % TRACES)]
    return sorted(found, key=lambda pair: pair[1].tick)


def episodes(offered: list[tuple[str, Arrival]], pooled: bool) -> list[tuple[int, int]]:
    """(first tick, tick after the last). `pooled`: requests wait at the fleet, for any instance."""
    changes = {home: [0] * (TRACE_TICKS + 1) for home in ("i0", "i1")}
    for home, one in offered:
        changes[home][one.tick] += one.prompt + one.output
        changes[home][min(one.tick + one.output, TRACE_TICKS)] -= one.prompt + one.output
    needed = [accumulate(of_one) for of_one in changes.values()]
    both = zip(*needed, strict=True)
    over = [sum(pair) >= 2 * BASE if pooled else max(pair) >= BASE for pair in both]
    found, start = [], None
    for tick, overload in enumerate([*over, False]):
        if overload:
            start = tick if start is None else start
        else:
            if start is not None and tick - start >= EPISODE_TICKS:
                found.append((start, tick))
            start = None
    return found


@dataclass
class Score:
    episodes: int = 0
    acted_on: int = 0
    calm: int = 0
    good: int = 0


def score(make: Any, seeds: range) -> Score:
    total = Score()
    for seed in seeds:
        offered = arrivals(seed)
        found = episodes(offered, pooled=seed % 2 == 0)
        fleet, policy, state = SimulatedFleet(2, random.Random(seed), queue_at_fleet=seed % 2 == 0), make(), None
        kinds: list[tuple[int, str]] = []
        dropped: list[bool] = []
        waiting = offered[::-1]
        for tick in range(TRACE_TICKS):
            now = []
            while waiting and waiting[-1][1].tick <= tick:
                now.append(waiting.pop())
            plan = policy.decide(fleet.step(now), state)
            state = plan.state
            fleet.act(plan)
            if plan.drops or plan.restores:
                kinds.append((tick, "drop" if plan.drops else "restore"))
            dropped.append(any(len(group.layers) > 1 for group in fleet.groups))
        for (start, _), (end, _) in zip(found, [*found, (TRACE_TICKS, 0)][1:], strict=True):
            acted = any(kind == "drop" and start <= tick < start + SOON for tick, kind in kinds)
            acted = acted or any(dropped[start : start + SOON])
            within = [kind for tick, kind in kinds if start <= tick < end]
            calm = sum(a != b for a, b in itertools.pairwise(within)) <= 1
            total.episodes += 1
            total.acted_on += acted
            total.calm += calm
            total.good += acted and calm
    return total


class DoNothing:
    def decide(self, snapshot: FleetSnapshot, state: Any) -> OverloadPlan:
        return OverloadPlan((), (), "never", OverloadState())


class Hasty(OverloadPolicy):
    """Forgets all that it has seen before: neither counts ticks nor waits."""

    def __init__(self) -> None:
        super().__init__(
            Overload(pressure_ticks=1, recovery_ticks=1, restore_below=0.95, margin=0.0, cooldown_s=0, dwell_s=0)
        )

    def decide(self, snapshot: FleetSnapshot, state: Any = None) -> OverloadPlan:
        return super().decide(snapshot, None)


@pytest.mark.slow
@pytest.mark.parametrize("traces", [FEW, pytest.param(TRACES, marks=pytest.mark.long)])
def test_overloads_are_answered_and_there_is_no_chatter(traces: int) -> None:
    total = score(OverloadPolicy, range(traces))
    assert total.episodes >= traces / 2, total
    assert total.good >= 0.95 * total.episodes, total


@pytest.mark.slow
def test_policies_that_do_nothing_or_forget_fail() -> None:
    nothing, hasty = score(DoNothing, range(20)), score(Hasty, range(20))
    assert nothing.calm == nothing.episodes
    assert nothing.good < 0.5 * nothing.episodes
    assert hasty.calm < 0.8 * hasty.episodes


def test_a_group_drops_once_unless_it_is_to_drop_as_little_as_suffices() -> None:
    again = {}
    for partial in (False, True):
        again[partial] = 0
        for seed in range(4):
            fleet, policy, state = (
                SimulatedFleet(2, random.Random(seed)),
                OverloadPolicy(Overload(partial=partial)),
                None,
            )
            waiting = arrivals(seed)[::-1]
            for tick in range(TRACE_TICKS):
                now = []
                while waiting and waiting[-1][1].tick <= tick:
                    now.append(waiting.pop())
                plan = policy.decide(fleet.step(now), state)
                state = plan.state
                again[partial] += sum(len(fleet.groups[n].layers) > 1 for drop in plan.drops for n in drop.groups)
                fleet.act(plan)
    assert again[False] == 0 < again[True]


@pytest.mark.parametrize("seed", range(3))
def test_one_hot_instance_of_eight_takes_one_partner_and_the_others_never_change(seed: int) -> None:
    """It needs half as much again as it has, the others a third of what they have."""
    choose = random.Random(seed)
    offered = [
        (f"i{number}", Arrival(tick, choose.randint(16, 32), choose.randint(24, 48)))
        for tick in range(300)
        for number in range(8)
        for _ in range(choose.random() < (0.7 if number == 3 else 0.15))
    ]
    fleet, policy, state = SimulatedFleet(8, choose), OverloadPolicy(), None
    together: set[tuple[str, ...]] = set()
    for tick in range(300):
        plan = policy.decide(fleet.step([pair for pair in offered if pair[1].tick == tick]), state)
        state = plan.state
        fleet.act(plan)
        together |= {tuple(sorted(group.layers)) for group in fleet.groups if len(group.layers) > 1}
    (pair,) = together
    assert "i3" in pair
    assert len(pair) == 2
    assert sum(len(group.layers) == 1 for group in fleet.groups) >= 6
