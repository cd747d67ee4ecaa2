"""The policies act on every burst soon, and do not chatter: 100 simulated noisy traces for each mode,
or 200.

An episode is a time of 3 s or more in which the requests would need more KV than the mode's entry threshold, if all
were let in at once. It is acted on if, within N = 20 ticks (2 s) of its beginning, layers are swapped, or use is below
the threshold because layers still are, or none is left to swap. A reversal is a swap after a restore or a restore after
a swap; from the beginning of an episode to the beginning of the next there may be one.
"""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest

from elastic import Policy
from elastic.controller.decision import ControllerPolicy, Plan
from elastic.controller.policies.precision import PrecisionPolicy
from elastic.controller.snapshot import Snapshot
from elastic.types import Restore, Swap
from support.planning.simulated_server import BASE, KINDS, LAYERS, SIZES, TICK_S, Plant, demand, trace

N = 20
TRACES, FEW = 200, 100
"""The few have as many of each kind."""
EPISODE_S = 3.0


@functools.cache
def arrivals_of(seed: int) -> Any:
    """A trace: made when a test asks, not by every process that collects tests."""
    return trace(KINDS[seed % 4], seed)


@functools.cache
def demand_of(seed: int) -> list[int]:
    """The bytes that it needs at each tick."""
    return demand(arrivals_of(seed))


def episodes(needed: list[int], threshold: float) -> list[tuple[int, int]]:
    """(first tick, tick after the last)."""
    found, start = [], None
    for tick, bytes_ in enumerate([*needed, 0]):
        if bytes_ >= threshold * BASE:
            start = tick if start is None else start
        else:
            if start is not None and tick - start >= EPISODE_S / TICK_S:
                found.append((start, tick))
            start = None
    return found


@dataclass
class Run:
    """What a policy did with a trace."""

    actions: list[tuple[int, str]]
    """(tick, `swap` or `restore`)."""
    relieved: list[bool]
    """At each tick: layers are swapped, and use is below the threshold or no layer is left."""


def drive(policy: ControllerPolicy, seed: int, settings: Policy) -> Run:
    plant, state, run = Plant(arrivals_of(seed), random.Random(seed)), None, Run([], [])
    for _ in demand_of(seed):
        snapshot = plant.step()
        plan = policy.decide(snapshot, state)
        state = plan.state
        if plan.actions:
            run.actions.append((plant.now - 1, "swap" if isinstance(plan.actions[0], Swap) else "restore"))
        plant.act(plan.actions)  # type: ignore[arg-type]
        swapped = plant.layers.count("int4")
        enough = plant.used < settings.kv_high * plant.capacity or swapped >= min(settings.max_layers, LAYERS)
        run.relieved.append(swapped > 0 and enough)
    return run


@dataclass
class Score:
    episodes: int = 0
    acted_on: int = 0
    calm: int = 0
    """With no more than one reversal."""
    good: int = 0
    """Both."""


def score(make: Any, settings: Policy, traces: int = FEW) -> Score:
    total = Score()
    for seed in range(traces):
        needed = demand_of(seed)
        found = episodes(needed, settings.kv_high)
        run = drive(make(settings), seed, settings)
        for (start, _), following in zip(found, [*found, (len(needed), 0)][1:], strict=True):
            total.episodes += 1
            soon = range(start, min(start + N, len(needed)))
            swapped = any(start <= tick < start + N and kind == "swap" for tick, kind in run.actions)
            acted = swapped or any(run.relieved[tick] for tick in soon)
            kinds = [kind for tick, kind in run.actions if start <= tick < following[0]]
            calm = sum(a != b for a, b in itertools.pairwise(kinds)) <= 1
            total.acted_on += acted
            total.calm += calm
            total.good += acted and calm
    return total


def passes(total: Score, traces: int = FEW) -> bool:
    return total.episodes >= traces and total.good >= 0.95 * total.episodes


class DoNothing:
    def decide(self, snapshot: Snapshot, state: Any) -> Plan:
        return Plan((), "never")


class FlipFlop:
    """Swaps and restores in turn."""

    def decide(self, snapshot: Snapshot, state: Any) -> Plan:
        if snapshot.busy:
            return Plan((), "busy", state)
        return Plan((Restore((0,)) if state else Swap((0,), "int4"),), "the other way", not state)


def of_modes(settings: Policy) -> ControllerPolicy:
    return PrecisionPolicy(settings, range(LAYERS), ("int4",), SIZES)


@pytest.mark.parametrize("traces", [FEW, pytest.param(TRACES, marks=pytest.mark.long)])
@pytest.mark.parametrize("mode", ["accuracy", "balanced", "performance"])
@pytest.mark.slow
def test_the_modes_act_on_episodes_and_do_not_chatter(mode: str, traces: int) -> None:
    total = score(of_modes, Policy.named(mode), traces)
    assert passes(total, traces), total


@pytest.mark.slow
def test_a_policy_that_does_nothing_fails() -> None:
    total = score(lambda settings: DoNothing(), Policy())
    assert total.calm == total.episodes
    assert not passes(total)


@pytest.mark.slow
def test_a_policy_that_flips_and_flops_fails() -> None:
    total = score(lambda settings: FlipFlop(), Policy())
    assert total.good < 0.5 * total.episodes
    assert not passes(total)
