"""What the simulator is told of ranks, fitted to steps that real ones computed for requests of no other run.

A step takes what its chunks cost, at the machine's pace, times noise; and longer while another rank computes, as the
cores of a host share its memory, and the fleet's process has none to itself. The pace changes from minute to minute,
with what else runs on the same machine: so requests that calibrate are served just before and just after others.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

from sim_runs import ENGINE, TimedStep

from elastic.planning.estimate.layer_cost import LayerCost
from elastic.planning.least_squares import not_negative
from elastic.planning.pipeline.chunk_cost import BatchTiming, Chunk
from elastic.sim.core.host import HostSharing
from elastic.sim.core.step_seconds import WARM, BehindPrompt, MeasuredPace, MeasuredStep
from elastic.sim.mechanisms.model import Links

CONTENTIONS = tuple(0.05 * number for number in range(13))
"""That are tried."""
CORES = 2
"""Of the host."""
MOST_STEPS = 500
"""Of a fleet, that are fitted to."""
ROUNDS = 2
MOST_TAKEN = 0.8
"""Of a step, that messages can have taken."""
FEW = 0.1
"""Of its time, while another step is computed: it is taken to be by itself."""
STAGE_LINKS = Links(bytes_s=1e9, hop_s=3e-4)
"""Of ranks of which nobody measured what is between them."""
MOST_BYTES_S = 1e12
WARM_BEHIND = 16
"""Steps of single tokens behind a prompt, after which caches have the weights again."""
MOST_KEPT = 0.9


@dataclass(frozen=True)
class DividedCost:
    """What two ranks divide of a step whose layers they share: attention, and a share of the products.

    Networks are cut, other matrices are not; nor is what home does beside its turn.
    """

    cost: LayerCost
    """Of a step of one rank."""
    share: float
    beside_s: float = 0.0
    beside_chunk_s: float = 0.0

    def batch(self, chunks: Sequence[Chunk]) -> float:
        """Return the seconds of a batch."""
        products_s, attention_s = self.parts(chunks)
        return self.share * products_s + attention_s

    def parts(self, chunks: Sequence[Chunk]) -> tuple[float, float]:
        """Return the seconds of a batch's products with weights, and of attention, as far as ranks compute them."""
        whole_s = self.cost.batch(chunks)
        attention_s = replace(self.cost, matrices=tuple((n, 0.0) for n, _ in self.cost.matrices), chunk=0.0).batch(
            chunks
        )
        return max(0.0, whole_s - attention_s - self.home_s(chunks)), attention_s

    def home_s(self, chunks: Sequence[Chunk]) -> float:
        """Return what home does of a step beside its turn."""
        return self.beside_s + self.beside_chunk_s * (len(chunks) - 1)

    def times(self, factor: float) -> DividedCost:
        """Return so many times these seconds."""
        return DividedCost(self.cost.times(factor), self.share, factor * self.beside_s, factor * self.beside_chunk_s)


@dataclass(frozen=True)
class Fitted:
    """What calibration gave."""

    cost: LayerCost
    """At the pace of the first calibration."""
    sharing: HostSharing
    steps: tuple[MeasuredStep, ...]
    """Seconds of steps by the cost, and how many times these they took by themselves."""
    paces: Mapping[str, float]
    """Calibration -> how many times as long steps took there."""
    behind_prompt: BehindPrompt = WARM
    """What steps of single tokens take longer behind a prompt, at the pace of the first calibration."""
    cut: DividedCost | None = None
    """What ranks that share layers divide among them."""
    hop_s: float = 3e-4
    """An exchange of ranks that share layers: what they wait for,"""
    core_s: float = 0.0
    """and what it takes of each of them."""
    stage_links: Links = STAGE_LINKS
    """What is between ranks that are stages; the bytes of an exchange take as long."""
    beside_s: float = 0.0
    """What home does of a step beside its turn to compute, at the pace of the first calibration,"""
    beside_chunk_s: float = 0.0
    """and for each chunk after the first."""

    @property
    def error(self) -> float:
        """The mean relative error of a step."""
        return statistics.mean(abs(1 / step.factor - 1) for step in self.steps)

    def at_pace_of(self, calibrations: Sequence[str]) -> Fitted:
        """Return what is so at the mean pace of some."""
        pace = statistics.mean(self.paces[name] for name in calibrations)
        cut = None if self.cut is None else self.cut.times(pace)
        behind_prompt = replace(self.behind_prompt, first_s=pace * self.behind_prompt.first_s)
        beside = {"beside_s": pace * self.beside_s, "beside_chunk_s": pace * self.beside_chunk_s}
        return replace(self, cost=self.cost.times(pace), behind_prompt=behind_prompt, cut=cut, **beside)

    def costs_s(self, steps: Sequence[TimedStep]) -> list[float]:
        """Return what each of these steps costs, which are all of their ranks'."""
        return _costs_s(self.cost, self.behind_prompt, steps, since_prompts(steps))

    def alone_s(self, steps: Sequence[TimedStep]) -> list[float]:
        """Return what each of these steps would have taken if nothing else had been computed meanwhile."""
        return [_alone_s(*each, self.sharing) for each in zip(steps, beside(steps), strict=True)]

    def pace_over(self, calibrations: Sequence[str], steps: Sequence[TimedStep]) -> float:
        """Return how many times as long steps took as at the pace of calibrations, in all."""
        return math.fsum(self.alone_s(steps)) / math.fsum(self.at_pace_of(calibrations).costs_s(steps))

    def paces_of(self, steps: Sequence[TimedStep], begin_s: float, within_s: float) -> dict[int, MeasuredPace]:
        """Return the pace of each rank in a run that began then, by its process id: a mean over so many seconds of
        steps without a gap; 0: each step has its own."""
        found: dict[int, list[tuple[float, float, float]]] = {}
        for step, cost_s in zip(steps, self.costs_s(steps), strict=True):
            paces = found.setdefault(step.rank, [])
            since_s, until_s = step.begin_s - begin_s, step.end_s - begin_s
            if paces and paces[-1][1] == since_s and since_s - paces[-1][0] < within_s:
                since_s, _, before_s = paces.pop()
                cost_s += before_s
            paces.append((since_s, until_s, cost_s))
        return {rank: MeasuredPace(each) for rank, each in found.items()}


def fit(calibrations: Mapping[str, Sequence[TimedStep]], frontend_s: float = 0.0, *, attention: bool = True) -> Fitted:
    """Fit to the steps of each calibration. The first one's pace is 1.

    `frontend_s`: what the fleet's process computes for each step, which was measured. What ranks take from each other
    is fitted at one pace for all: fleets of two ranks that are always busy could as well be taken for slow ones.
    """
    every = {name: 1 + len(steps) // MOST_STEPS for name, steps in calibrations.items()}
    thinned = {name: steps[:: every[name]] for name, steps in calibrations.items()}
    others = {name: beside(steps)[:: every[name]] for name, steps in calibrations.items()}
    since = {name: since_prompts(steps)[:: every[name]] for name, steps in calibrations.items()}
    sharings = (HostSharing(contention, frontend_s=frontend_s, cores=CORES) for contention in CONTENTIONS)
    best = min((_fit(thinned, others, since, sharing, attention, rounds=1) for sharing in sharings), key=_off)
    return _fit(thinned, others, since, best.sharing, attention)


def _fit(
    calibrations: Mapping[str, Sequence[TimedStep]],
    others: Mapping[str, Sequence[Beside]],
    since: Mapping[str, Sequence[int | None]],
    sharing: HostSharing,
    attention: bool,
    rounds: int = ROUNDS,
) -> Fitted:
    """Fit the cost, what steps take longer behind prompts, and the paces in turn; in one round at one pace for all."""
    alone = {
        name: [_alone_s(step, beside, sharing) for step, beside in zip(steps, others[name], strict=True)]
        for name, steps in calibrations.items()
    }
    first, paces = next(iter(calibrations)), dict.fromkeys(calibrations, 1.0)
    has_warm = any(behind is not None and behind >= WARM_BEHIND for each in since.values() for behind in each)
    behind_prompt = WARM
    for _ in range(rounds):
        samples = [
            BatchTiming(step.chunks, seconds / paces[name])
            for name, steps in calibrations.items()
            for step, seconds, behind in zip(steps, alone[name], since[name], strict=True)
            if behind is None or behind >= WARM_BEHIND or not has_warm
        ]
        cost = LayerCost.fit(samples, block=ENGINE["block_tokens"], attention=attention)
        more_s = [
            (behind, seconds / paces[name] - cost.batch(step.as_chunks))
            for name, steps in calibrations.items()
            for step, seconds, behind in zip(steps, alone[name], since[name], strict=True)
            if behind is not None
        ]
        behind_prompt = _behind_prompt(more_s)
        costs = {name: _costs_s(cost, behind_prompt, steps, since[name]) for name, steps in calibrations.items()}
        paces = {name: math.fsum(alone[name]) / math.fsum(costs[name]) for name in calibrations}
    measured = tuple(
        MeasuredStep(each * paces[first], seconds / (each * (paces[name] if rounds > 1 else 1.0)))
        for name in calibrations
        for each, seconds in zip(costs[name], alone[name], strict=True)
    )
    told = {name: pace / paces[first] for name, pace in paces.items()}
    behind_prompt = replace(behind_prompt, first_s=behind_prompt.first_s * paces[first])
    return Fitted(cost.times(paces[first]), sharing, measured, told, behind_prompt)


def _behind_prompt(more_s: Sequence[tuple[int, float]]) -> BehindPrompt:
    """Fit what steps of single tokens take longer, so many steps behind a prompt, than those long after one."""
    warm = [seconds for behind, seconds in more_s if behind >= WARM_BEHIND]
    each = [[seconds for behind, seconds in more_s if behind == number] for number in range(4)]
    if not warm or not all(each):
        return WARM
    usual_s = statistics.median(warm)
    first_s, *next_s = (max(0.0, statistics.median(seconds) - usual_s) for seconds in each)
    before_s = first_s + math.fsum(next_s[:-1])
    return BehindPrompt(first_s, min(MOST_KEPT, math.fsum(next_s) / before_s) if before_s else 0.0)


def _costs_s(
    cost: LayerCost, behind_prompt: BehindPrompt, steps: Sequence[TimedStep], since: Sequence[int | None]
) -> list[float]:
    return [
        cost.batch(step.as_chunks) + (0.0 if behind is None else behind_prompt.more_s(behind))
        for step, behind in zip(steps, since, strict=True)
    ]


def since_prompts(steps: Sequence[TimedStep]) -> list[int | None]:
    """Return for each step how many steps of single tokens its rank has computed since a prompt; None: it has one."""
    last: dict[int, int] = {}
    found: list[int | None] = []
    for step in steps:
        if any(count > 1 for _, count in step.chunks):
            last[step.rank] = -1
            found.append(None)
        else:
            last[step.rank] = last.get(step.rank, WARM_BEHIND) + 1
            found.append(last[step.rank])
    return found


def _off(fitted: Fitted) -> float:
    """Return how far off costs are in the mean, each step by its seconds: few prompts take as long as many steps of one
    token. Not in squares, of which those of a few steps that something held up are most."""
    return math.fsum(step.cost_s * abs(step.factor - 1) for step in fitted.steps) / math.fsum(
        step.cost_s for step in fitted.steps
    )


class Beside(NamedTuple):
    """What was computed beside a step."""

    share: float
    """Of its time, in which another rank computed a step."""
    ended: int
    """Steps of others that ended meanwhile, of which the fleet's process took a message, as of the step itself."""


def _alone_s(step: TimedStep, beside: Beside, sharing: HostSharing) -> float:
    """Return what a step takes by itself."""
    seconds = step.seconds - taken_s(step, beside.share + beside.ended, sharing)
    return seconds * (1 - beside.share * sharing.contention / (1 + sharing.contention))


def taken_s(step: TimedStep, messages: float, sharing: HostSharing) -> float:
    """Return what messages take from a step while ranks compute on all cores: a part of each, as of all ranks."""
    return min(MOST_TAKEN * step.seconds, messages * sharing.frontend_s / CORES)


def beside(steps: Sequence[TimedStep]) -> list[Beside]:
    """Return for each step what else was computed; a rank has one step at a time, and tells the fleet behind it."""
    shares, ended = [0.0] * len(steps), [0] * len(steps)
    for rank in {step.rank for step in steps}:
        others = sorted((step for step in steps if step.rank == rank), key=attrgetter("begin_s"))
        for number, step in enumerate(steps):
            at = bisect_right(others, step.begin_s, key=attrgetter("end_s")) if step.rank != rank else len(others)
            while at < len(others) and others[at].begin_s < step.end_s:
                both = min(step.end_s, others[at].end_s) - max(step.begin_s, others[at].begin_s)
                shares[number] += both / step.seconds
                ended[number] += others[at].end_s <= step.end_s
                at += 1
    return list(map(Beside, shares, ended))


class StagedSteps(NamedTuple):
    """What two ranks computed that are stages, for one request at a time."""

    steps: Sequence[TimedStep]
    bubbles: float
    """Of the time of both, the share in which they did not compute while there was a step."""
    pairs: Sequence[TimedStep] = ()
    """For one request at a time at each of two instances."""
    several: Sequence[TimedStep] = ()
    """For some requests at a time at each."""


def messages_s(arrivals_s: Sequence[float], steps: Sequence[TimedStep]) -> list[float]:
    """Return how long after their arrivals the first steps began of requests that came when no rank computed."""
    found = []
    for at_s in arrivals_s:
        begins_s = [step.begin_s for step in steps if step.end_s > at_s]
        if begins_s and min(begins_s) >= at_s:
            found.append(min(begins_s) - at_s)
    return found


def with_home(fitted: Fitted, calibrations: Mapping[str, Sequence[TimedStep]]) -> Fitted:
    """Fit what home does of a step beside its turn, a straight line over chunks.

    While another instance has steps the core is shared with these. By how much longer home takes then is told by steps
    of one chunk.
    """
    alone_s, both_s = defaultdict(list), defaultdict(list)  # by chunks after the first
    for name, steps in calibrations.items():
        for step, others in zip(steps, beside(steps), strict=True):
            if step.turn_s and not FEW <= others.share <= 1 - FEW:
                each_s = alone_s if others.share < FEW else both_s
                each_s[len(step.chunks) - 1].append((step.seconds - step.turn_s) / fitted.paces[name])
    if not alone_s[0]:
        return fitted
    slower = max(1.0, statistics.mean(both_s[0]) / statistics.mean(alone_s[0])) if both_s[0] else 1.0
    rows = []
    for times, by_chunks in ((1.0, alone_s), (slower, both_s)):
        for further, each in by_chunks.items():
            seconds = statistics.mean(each or [math.inf]) / times
            rows += len(each) * [[1 / seconds, further / seconds]]
    beside_s, beside_chunk_s = not_negative(rows)
    return replace(fitted, beside_s=beside_s, beside_chunk_s=beside_chunk_s)
