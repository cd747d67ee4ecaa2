"""What the simulator is told of ranks, fitted to steps that real ones computed for requests of no other run.

A step takes what its chunks cost, at the machine's pace, times noise; and longer while another rank computes, as the
cores of a host share its memory. The pace changes from minute to minute, with what else runs on the same machine: so
requests that calibrate are served just before and just after others.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from sim_runs import ENGINE, LAYERS, TimedStep

from elastic.planning.estimate.layer_cost import LayerCost
from elastic.planning.least_squares import not_negative
from elastic.planning.pipeline.chunk_cost import BatchTiming
from elastic.sim.core.step_seconds import MeasuredPace, MeasuredStep
from elastic.sim.mechanisms.model import LayeredModel, Links

CONTENTIONS = tuple(0.1 * number for number in range(9))
"""That are tried."""
MOST_STEPS = 500
"""Of a fleet, that are fitted to."""
ROUNDS = 2
FEW = 0.1
"""Of its time, while another step is computed: it is taken to be by itself."""
REST = LayeredModel.rest
STAGE_LINKS = Links(bytes_s=1e9, hop_s=3e-4)
"""Of ranks of which nobody measured what is between them."""


@dataclass(frozen=True)
class Fitted:
    """What calibration gave."""

    cost: LayerCost
    """At the pace of the first calibration."""
    contention: float
    steps: tuple[MeasuredStep, ...]
    """Seconds of steps by the cost, and how many times these they took by themselves."""
    paces: Mapping[str, float]
    """Calibration -> how many times as long steps took there."""
    cut: LayerCost | None = None
    """What ranks that share layers divide among them."""
    hop_s: float = 3e-4
    """An exchange of ranks that share layers: what they wait for,"""
    core_s: float = 0.0
    """and what it takes of each of them."""
    stage_links: Links = STAGE_LINKS
    """What is between ranks that are stages; the bytes of an exchange take as long."""

    @property
    def error(self) -> float:
        """The mean relative error of a step."""
        return statistics.mean(abs(1 / step.factor - 1) for step in self.steps)

    def at_pace_of(self, calibrations: Sequence[str]) -> Fitted:
        """Return what is so at the mean pace of some."""
        pace = statistics.mean(self.paces[name] for name in calibrations)
        return replace(self, cost=self.cost.times(pace), cut=None if self.cut is None else self.cut.times(pace))

    def pace_over(self, calibrations: Sequence[str], steps: Sequence[TimedStep]) -> float:
        """Return how many times as long steps took as at the pace of calibrations, in all."""
        cost = self.at_pace_of(calibrations).cost
        costs = math.fsum(cost.batch(step.as_chunks) for step in steps)
        return (
            math.fsum(_alone_s(step, share, self.contention) for step, share in zip(steps, beside(steps), strict=True))
            / costs
        )

    def paces_of(self, steps: Sequence[TimedStep], begin_s: float, within_s: float) -> dict[int, MeasuredPace]:
        """Return the pace of each rank in a run that began then, by its process id: a mean over so many seconds of
        steps without a gap; 0: each step has its own."""
        found: dict[int, list[tuple[float, float, float]]] = {}
        for step in steps:
            cost_s = self.cost.batch(step.as_chunks)
            paces = found.setdefault(step.rank, [])
            since_s, until_s = step.begin_s - begin_s, step.end_s - begin_s
            if paces and paces[-1][1] == since_s and since_s - paces[-1][0] < within_s:
                since_s, _, before_s = paces.pop()
                cost_s += before_s
            paces.append((since_s, until_s, cost_s))
        return {rank: MeasuredPace(each) for rank, each in found.items()}


def fit(calibrations: Mapping[str, Sequence[TimedStep]], *, attention: bool = True) -> Fitted:
    """Fit to the steps of each calibration. The first one's pace is 1."""
    every = {name: 1 + len(steps) // MOST_STEPS for name, steps in calibrations.items()}
    thinned = {name: steps[:: every[name]] for name, steps in calibrations.items()}
    shares = {name: beside(steps)[:: every[name]] for name, steps in calibrations.items()}
    found = (_fit(thinned, shares, contention, attention) for contention in CONTENTIONS)
    return min(found, key=lambda each: math.fsum((step.factor - 1) ** 2 for step in each.steps))


def _fit(
    calibrations: Mapping[str, Sequence[TimedStep]],
    shares: Mapping[str, Sequence[float]],
    contention: float,
    attention: bool,
) -> Fitted:
    """Fit the cost and the paces in turn."""
    alone = {
        name: [_alone_s(step, share, contention) for step, share in zip(steps, shares[name], strict=True)]
        for name, steps in calibrations.items()
    }
    first, paces = next(iter(calibrations)), dict.fromkeys(calibrations, 1.0)
    for _ in range(ROUNDS):
        samples = [
            BatchTiming(step.chunks, seconds / paces[name])
            for name, steps in calibrations.items()
            for step, seconds in zip(steps, alone[name], strict=True)
        ]
        cost = LayerCost.fit(samples, block=ENGINE["block_tokens"], attention=attention)
        costs = {name: [cost.batch(step.as_chunks) for step in steps] for name, steps in calibrations.items()}
        paces = {name: math.fsum(alone[name]) / math.fsum(costs[name]) for name in calibrations}
    measured = tuple(
        MeasuredStep(each * paces[first], seconds / (each * paces[name]))
        for name in calibrations
        for each, seconds in zip(costs[name], alone[name], strict=True)
    )
    return Fitted(
        cost.times(paces[first]), contention, measured, {name: pace / paces[first] for name, pace in paces.items()}
    )


def _alone_s(step: TimedStep, share: float, contention: float) -> float:
    """Return what a step takes by itself, that was beside others for a share of its time."""
    return step.seconds * (1 - share * contention / (1 + contention))


def beside(steps: Sequence[TimedStep]) -> list[float]:
    """Return for each step the share of its time in which another rank computed one of them; a rank has one at a
    time."""
    found = [0.0] * len(steps)
    for rank in {step.rank for step in steps}:
        others = sorted((step for step in steps if step.rank == rank), key=attrgetter("begin_s"))
        for number, step in enumerate(steps):
            at = bisect_right(others, step.begin_s, key=attrgetter("end_s")) if step.rank != rank else len(others)
            while at < len(others) and others[at].begin_s < step.end_s:
                both = min(step.end_s, others[at].end_s) - max(step.begin_s, others[at].begin_s)
                found[number] += both / step.seconds
                at += 1
    return found


def messages_s(arrivals_s: Sequence[float], steps: Sequence[TimedStep]) -> list[float]:
    """Return how long after their arrivals the first steps began of requests that came when no rank computed."""
    found = []
    for at_s in arrivals_s:
        begins_s = [step.begin_s for step in steps if step.end_s > at_s]
        if begins_s and min(begins_s) >= at_s:
            found.append(min(begins_s) - at_s)
    return found


def with_shared_layers(fitted: Fitted, calibrations: Mapping[str, Sequence[TimedStep]]) -> Fitted:
    """Fit what ranks that share layers divide, and their exchanges, to steps of one request at a time, and of two.

    Attention is divided by heads; of products a share is, as networks are cut and other matrices are not. A straight
    line over the seconds of products tells it, and what a step takes longer by its exchanges. What of these the ranks
    wait for, two instances wait for at the same time; the rest keeps each rank busy, for one of them after the other.
    """
    rows, paired = [], []
    for name, steps in calibrations.items():
        here = fitted.at_pace_of([name]).cost.times(1 + fitted.contention)
        for step, share in zip(steps, beside(steps), strict=True):
            row = _shared_row(here, step) if share < FEW else []
            rows += [row] if row else []
            paired += [(here, step)] if share > 1 - FEW else []
    kept, exchanged_s = not_negative(rows)
    share = min(1.0, max(0.0, 2 * (1 - kept)))
    decoded = [(cost, step) for cost, step in paired if [count for _, count in step.chunks] == [1]]
    busy_s = [step.seconds / 2 - _shared_s(cost, share, step) for cost, step in decoded]
    core_s = min(exchanged_s, max(0.0, statistics.median(busy_s))) if busy_s else 0.0
    exchanges = 2 * LAYERS
    return replace(
        fitted, cut=cut(fitted.cost, share), hop_s=(exchanged_s - core_s) / exchanges, core_s=core_s / exchanges
    )


def _shared_s(cost: LayerCost, share: float, step: TimedStep) -> float:
    """Return what each of two ranks computes of the steps of two instances, for each of these; without exchanges."""
    alone, divided = cost.batch(step.as_chunks), cut(cost, share).batch(step.as_chunks)
    return alone * (1 - REST / 2) - divided / 2


def _shared_row(cost: LayerCost, step: TimedStep) -> list[float]:
    """Return the products of a shared step, and 1, over what it took besides other terms; [] where that is nothing."""
    alone, attention, with_products = (c.batch(step.as_chunks) for c in (cost, cut(cost, 0.0), cut(cost, 1.0)))
    products = with_products - attention
    left = step.seconds - (alone - products - attention / 2)
    return [products / left, 1 / left] if left > 0 else []


def cut(cost: LayerCost, share: float) -> LayerCost:
    """Return what of a step ranks divide that share its layers: attention, and a share of the products."""
    return replace(cost, matrices=tuple((tokens, share * seconds) for tokens, seconds in cost.matrices), chunk=0.0)
