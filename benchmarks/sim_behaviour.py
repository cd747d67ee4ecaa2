"""What the simulator is held to besides figures: what was done and when, bubbles of stages, steps in shared layers."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastic.engines.pipeline.turn import StageTimes

LIMITS = {"actions": 1.0, "action_s": 1.0, "bubbles": 0.03, "shared_step": 0.05}
"""The most that any run may be off: actions too many or too few, seconds of when they were, points of the share of
bubbles, and relative seconds of a step that ranks share."""
OTHER_EVENTS = ("joined", "refused", "overloaded")
"""Of a fleet, that are no actions: nothing changed for its requests."""


@dataclass(frozen=True)
class Behaviour:
    """How a fleet behaved during a run."""

    actions: tuple[tuple[str, float], ...] = ()
    """What was done, and when: seconds since requests could come, until none could any more."""
    bubbles: float | None = None
    """Of the time in which the stages of a pipeline had steps in flight, the share in which they did not compute."""
    shared_step_s: float | None = None
    """Of a step that ranks share, in the mean."""


def actions(events: Iterable[tuple[str, float]], until_s: float) -> tuple[tuple[str, float], ...]:
    """Return the actions among events, (kind, seconds), that were during a run of so many seconds."""
    return tuple((kind, at_s) for kind, at_s in events if kind not in OTHER_EVENTS and 0 <= at_s <= until_s)


def bubble_share(times: Iterable[StageTimes]) -> float | None:
    """Return the share of bubbles of all stages; None: none had steps."""
    every = list(times)
    bubble_s, busy_s = sum(each.bubble_s for each in every), sum(each.busy_s for each in every)
    return bubble_s / (bubble_s + busy_s) if bubble_s + busy_s else None


def differences(real: Behaviour, told: Behaviour) -> dict[str, float]:
    """Return by how much a simulated run is off, of what the real one has."""
    apart = Counter(kind for kind, _ in real.actions), Counter(kind for kind, _ in told.actions)
    found = {"actions": float(max((apart[0] - apart[1]).total(), (apart[1] - apart[0]).total()))}
    pairs_s = [abs(first - second) for first, second in _pairs(real.actions, told.actions)]
    if pairs_s:
        found["action_s"] = max(pairs_s)
    if real.bubbles is not None:
        found["bubbles"] = abs((told.bubbles or 0.0) - real.bubbles)
    if real.shared_step_s is not None:
        found["shared_step"] = abs((told.shared_step_s or 0.0) / real.shared_step_s - 1)
    return found


def _pairs(real: Iterable[tuple[str, float]], told: Iterable[tuple[str, float]]) -> Iterable[tuple[float, float]]:
    """Pair the times of actions of a kind, in their order."""
    times: defaultdict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for which, every in enumerate((real, told)):
        for kind, at_s in every:
            times[kind][which].append(at_s)
    return (pair for firsts, seconds in times.values() for pair in zip(firsts, seconds, strict=False))


def median_differences(real: Behaviour, told: Sequence[Behaviour]) -> dict[str, float]:
    """Return by how much simulated runs with other noise are off, in the median of those that have it."""
    every = [differences(real, each) for each in told]
    return {name: statistics.median(each[name] for each in every if name in each) for name in set().union(*every)}


def off(real: Sequence[Behaviour], told: Sequence[Sequence[Behaviour]]) -> dict[str, float]:
    """Return by how much simulations are off what was served, by the run that is worst; steps by their medians."""
    found = most_off([median_differences(*each) for each in zip(real, told, strict=True)])
    steps_s = [run.shared_step_s for run in real if run.shared_step_s]
    if steps_s:
        told_s = [run.shared_step_s or 0.0 for each in told for run in each]
        found["shared_step"] = abs(statistics.median(told_s) / statistics.median(steps_s) - 1)
    return found


def most_off(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return by how much the worst run is off; what no run has is missing."""
    return {name: max(run[name] for run in runs if name in run) for name in LIMITS if any(name in run for run in runs)}


def above_limits(off: Mapping[str, float]) -> list[str]:
    """Return what is further off than it may be."""
    return [name for name, by in off.items() if by > LIMITS[name]]
