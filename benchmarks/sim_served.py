"""Real runs that the simulator is held against: fleets that serve requests of each kind, and such as calibrate."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from common import SEED
from sim_behaviour import Behaviour
from sim_fit import StagedSteps, fit
from sim_runs import (
    ENGINE,
    LAYERS,
    LONGEST,
    Load,
    Played,
    Recorded,
    System,
    TimedStep,
    played,
    recorded,
    serving,
    together,
)

import elastic
from elastic.bench.traces.trace import Trace, TraceRequest
from elastic.controller.fleet_snapshot import FleetSnapshot
from elastic.controller.policies.overload import OverloadPlan, OverloadPolicy, OverloadState
from elastic.planning.estimate.layer_cost import LayerCost
from elastic.planning.pipeline.chunk_cost import Chunk
from elastic.sim.core.instance import PlacePages
from elastic.sim.quantiles import QuantileSketch
from elastic.sim.report import Report

PLACES = {"roomy": "cpu#{}=256MiB", "tight": "cpu#{}=40MiB"}
OVERLOAD = elastic.Overload(pressure_ticks=2, queue_high_s=0.1, dwell_s=3.0)
SYSTEMS = {
    "one": System(1, 0.3),
    "two": System(2, 0.5),
    "drop": System(2, 0.5, OVERLOAD),
    "tp": System(2, 0.5, tp=2),
    "stages": System(2, 0.4, stages=2),
    "two-killed": System(2, 0.3, kill=0.4),
    "tp-killed": System(2, 0.3, tp=2, kill=0.4),
}
"""In the first two requests wait until an instance has room for all that they may need. The last two lose a rank, with
which they end: they serve one kind of requests."""
SECONDS, QUICK_S = 14.0, 6.0
LENGTHS = {  # median and sigma of the logarithm, of prompts and answers
    "conv": ((300.0, 0.8), (80.0, 0.5)),
    "code": ((800.0, 0.6), (20.0, 0.6)),
    "bursts": ((200.0, 0.7), (60.0, 0.5)),
}
CALIBRATED = (400.0, 0.8), (60.0, 0.6)
BUSY = (0.2, 1.2, 0.4, 0.7)
"""Of the time of ranks, what is asked of them while they calibrate, for a fourth of the time each."""
FIGURES = ("tokens_per_s", "p50_ttft_s", "p50_tpot_s", "kv_use", "p95_ttft_s", "p95_tpot_s", "p99_ttft_s", "p99_tpot_s")
ALONE = tuple(0.9 * number for number in range(4))
"""Seconds at which requests come that calibrate shared layers, and stages; one has ended before the next comes."""
SEVERAL = 12
"""Requests that come at once to two ranks that compute together, for what there is to do for each."""
MOST_OTHERS = 0.05
RESTORED_S = 30.0


@dataclass(frozen=True)
class RealRun:
    """Requests that a fleet served, and what came of them."""

    fleet: str
    load: str
    memory: str
    system: str
    trace: Trace
    pages: PlacePages
    figures: dict[str, float]
    steps: list[TimedStep]
    """To tell what the pace was meanwhile; nothing is fitted to them."""
    calibrations: tuple[str, ...]
    """Those before and after it."""
    begin_s: float
    """When requests began to come, by the clock of the steps."""
    ranks: tuple[int, ...]
    """Process ids, in the order of instances."""
    others: float
    """Cores that other processes kept busy meanwhile, in the mean."""
    behaviour: Behaviour

    @property
    def kill_s(self) -> float | None:
        """When its second rank is killed; None: it is not."""
        share = SYSTEMS[self.system].kill
        return None if share is None else share * self.trace.duration_s


@dataclass
class Measured:
    """What was served, and the steps of calibrations by name: by ranks alone, with shared layers, and as stages."""

    alone: dict[str, list[TimedStep]] = field(default_factory=dict)
    shared: dict[str, list[TimedStep]] = field(default_factory=dict)
    staged: dict[str, StagedSteps] = field(default_factory=dict)
    """By ranks that are stages, for one request at a time."""
    messages_s: list[float] = field(default_factory=list)
    """From the fleet to a rank: the tenth part of what requests wait for their first step, in each calibration."""
    frontends_s: list[float] = field(default_factory=list)
    """That the fleet's process computes for each step, in each calibration."""
    runs: list[RealRun] = field(default_factory=list)

    def add(self, other: Measured) -> None:
        """Add what was measured another time."""
        self.alone |= other.alone
        self.shared |= other.shared
        self.staged |= other.staged
        self.messages_s += other.messages_s
        self.frontends_s += other.frontends_s
        self.runs += other.runs


def calibration(seconds: float, ranks: int, seed: int, cost: LayerCost | None) -> Trace:
    """Return requests that keep ranks busy for more and less of the time, as those of runs do; without a cost, of which
    it is not known how busy they are."""
    prompt, answer = CALIBRATED
    each_s = 0.25 if cost is None else request_s(cost, prompt[0], answer[0])
    return Load("calibration", [(seconds / 4, ranks * share / each_s) for share in BUSY], prompt, answer).trace(seed)


def few_at_once(count: int, seed: str) -> Trace:
    """Return requests of which so many come at once; one or two have ended before the next ones come."""
    choose = random.Random(f"{SEED} {seed}")
    found = []
    for at_s in ALONE:
        prompt, answer = choose.randrange(40, 1500), choose.randrange(8, 24)
        found += [TraceRequest(at_s, prompt, answer)] * count
    return Trace(tuple(found), f"{count} at once", window=(0.0, ALONE[-1]))


class Served:
    """Serves, and writes down."""

    def __init__(self, path: Path, folder: Path, seconds: float, tries: int = 1) -> None:
        """`tries`: how often the same is served while other processes keep a core busy for more than `MOST_OTHERS`;
        what they disturbed the least counts."""
        self.measured = Measured()
        self._path, self._folder, self._seconds, self._tries = path, folder, seconds, tries
        self._cost: LayerCost | None = None

    def serve(self, memory: str, system: str, loads: Sequence[str], repeats: int = 1) -> None:
        """Have a fleet serve requests of each kind so many times, and before and after each such as calibrate.

        Ranks calibrate by themselves: those that share layers part for it, those that may drop layers have them all
        then, and no policy. Where they share, or are stages, they calibrate when they do, too. A fleet
        whose rank is killed serves once.
        """
        name, chosen_one, measured = f"{system}, {memory}", SYSTEMS[system], self.measured
        folder = self._folder / name
        folder.mkdir()

        def calibrate(engine: elastic.Fleet, number: int = 0) -> str:
            if self._cost is None:
                trace = calibration(0.4 * self._seconds, len(engine.status().instances), SEED, None)
                self._cost = fit({"": self._played(engine, trace, folder)[1]}).cost
            count = len(engine.status().instances)
            trace = calibration(0.4 * self._seconds, count, SEED + number, self._cost)
            run, measured.alone[f"{name} {number}"] = self._played(engine, trace, folder)
            measured.messages_s += run.report.queued_s.read(0.1)
            measured.frontends_s.append(run.frontend_s / max(1, len(measured.alone[f"{name} {number}"])))
            return f"{name} {number}"

        def begun(engine: elastic.Fleet) -> None:
            with no_policy():
                calibrate(engine)

        with serving(self._path, PLACES[memory], chosen_one, begun, step_budget=Recorded(folder)) as (engine, pages):
            before = f"{name} 0"
            self._calibrate_together(engine, chosen_one, before, folder)
            traces = {load: self._trace(load, memory, chosen_one, pages) for load in loads}
            served = loads[:1] if chosen_one.kill is not None else list(loads) * repeats
            for number, load in enumerate(served, 1):
                trace = traces[load]
                pids = tuple(rank.pid for rank in engine.status().ranks)
                run, steps = self._played(engine, trace, folder, chosen_one.kill)
                with no_policy(), by_themselves(engine, chosen_one):
                    after = calibrate(engine, number)
                if chosen_one.kill is None:
                    self._calibrate_together(engine, chosen_one, after, folder)
                real = RealRun(
                    name,
                    load,
                    memory,
                    system,
                    trace,
                    pages,
                    figures(run.report),
                    steps,
                    (before, after),
                    run.begin_s,
                    pids,
                    run.others,
                    behaviour_of(run, chosen_one, steps),
                )
                measured.runs.append(real)
                before = after
                print(f"{load}, {name}: {len(trace.requests)} requests; others {run.others:.2f} cores", flush=True)

    def _calibrate_together(self, engine: elastic.Fleet, system: System, name: str, folder: Path) -> None:
        """Have ranks calibrate that share layers, or are stages: by one request at a time, by two, and by several."""
        if system.tp > 1:
            every = [self._played(engine, few_at_once(count, name), folder)[1] for count in (1, 2, SEVERAL)]
            self.measured.shared[name] = [step for steps in every for step in steps]
        if system.stages > 1:
            run, steps = self._played(engine, few_at_once(1, name), folder)
            others = [self._played(engine, few_at_once(count, name), folder)[1] for count in (2, SEVERAL)]
            self.measured.staged[name] = StagedSteps(steps, run.behaviour.bubbles or 0.0, *others)

    def _played(
        self, engine: elastic.Fleet, trace: Trace, folder: Path, kill: float | None = None
    ) -> tuple[Played, list[TimedStep]]:
        """Have requests come; return what came of them and the steps that were computed. A rank is killed but once."""
        kill_s, tries = (None, self._tries) if kill is None else (kill * trace.duration_s, 1)
        found: list[tuple[Played, list[TimedStep]]] = []
        while not found or (len(found) < tries and found[-1][0].others > MOST_OTHERS):
            run = played(engine, trace, kill_s)
            found.append((run, recorded(folder, run.begin_s)))
        return min(found, key=lambda each: each[0].others)

    def _trace(self, load: str, memory: str, system: System, pages: PlacePages) -> Trace:
        assert self._cost is not None
        seed = SEED + 1 + list(PLACES).index(memory)
        trace = load_of(load, system.busy, self._seconds, self._cost).trace(seed)
        blocks = (pages.budget - pages.weights) // LAYERS
        return trace.with_tokens(1.0, most=min(LONGEST, blocks * int(ENGINE["block_tokens"])) // 2)


@contextmanager
def no_policy() -> Iterator[None]:
    """Have fleets of this process drop no layers, and restore none, by their policy."""
    decide = OverloadPolicy.decide

    def nothing(policy: OverloadPolicy, snapshot: FleetSnapshot, state: OverloadState | None = None) -> OverloadPlan:
        return OverloadPlan((), (), "ranks calibrate", state or OverloadState())

    OverloadPolicy.decide = nothing  # type: ignore[method-assign]
    yield
    OverloadPolicy.decide = decide  # type: ignore[method-assign]


@contextmanager
def by_themselves(engine: elastic.Fleet, system: System) -> Iterator[None]:
    """Have each rank compute all layers itself, and afterwards as the system has it."""
    names = [instance.name for instance in engine.status().instances]
    apart = not system.alone and len(names) > 1
    if apart and system.tp > 1:
        engine.reshard(names, tp=1)
    else:
        engine.restore()
    until_s = time.perf_counter() + RESTORED_S
    while any(len(instance.ranks) > 1 for instance in engine.status().instances):
        if time.perf_counter() > until_s:
            raise TimeoutError(f"layers that were dropped are not restored after {RESTORED_S} s")
        time.sleep(0.1)
    yield
    if apart:
        together(engine, system)


def behaviour_of(run: Played, system: System, steps: Sequence[TimedStep]) -> Behaviour:
    """Return how a real fleet behaved, as far as the system has it: bubbles of stages, steps of shared layers."""
    told = run.behaviour
    if system.stages == 1 or system.kill is not None:
        told = replace(told, bubbles=None)
    if system.tp > 1 and system.kill is None and steps:
        told = replace(told, shared_step_s=statistics.mean(step.seconds for step in steps))
    return told


def load_of(name: str, busy: float, seconds: float, cost: LayerCost) -> Load:
    """Return arrivals to two ranks that keep each busy for a share of the time; bursts come at three times the rate."""
    (prompt, _), (answer, _) = LENGTHS[name]
    rate = 2 * busy / request_s(cost, prompt, answer)
    if name != "bursts":
        return Load(name, [(seconds, rate)], *LENGTHS[name])
    calm, burst = (0.3 * seconds, 0.5 * rate), (0.2 * seconds, 3 * rate)
    return Load(name, [calm, burst, calm, burst], *LENGTHS[name])


def request_s(cost: LayerCost, prompt: float, answer: float) -> float:
    """Return the seconds of a rank for a request, of whose answer four tokens are computed at a time with others'."""
    step = int(ENGINE["max_batch_tokens"])
    starts = range(0, int(prompt), step)
    prompt_s = sum(cost.batch([Chunk("", start, min(step, int(prompt) - start))]) for start in starts)
    beside = [Chunk("", int(prompt), 1)] * 4
    return prompt_s + answer * cost.batch(beside) / len(beside)


def figures(report: Report) -> dict[str, float]:
    def quantiles(name: str, of: QuantileSketch) -> dict[str, float]:
        return dict(zip((f"p50_{name}", f"p95_{name}", f"p99_{name}"), of.read(0.5, 0.95, 0.99), strict=True))

    use = statistics.mean(sample.kv_use for sample in report.samples)
    times = {**quantiles("ttft_s", report.ttft_s), **quantiles("tpot_s", report.tpot_s)}
    found = {"tokens_per_s": report.tokens_per_s, "kv_use": use, **times}
    return {name: found[name] for name in FIGURES}
