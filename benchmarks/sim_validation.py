"""The simulator held against real runs that it was not fitted to, and the same with attention left out of its costs.

    python benchmarks/sim_validation.py [--quick] [--loads conv code bursts] [--systems one two] [--memory tight]

Ranks are pinned to a core each and serve a Llama in which attention takes as long as all else at 1,000 tokens. Each
fleet serves requests of no run first, of which the seconds of every step that the ranks computed are written down;
these calibrate (`sim_fit.py`). Then every kind of requests comes to every system, with memory for about as many tokens
as live on average and with plenty of it, and the same requests, at the same times, to the simulator, five times with
other noise, of which the median counts. Rates are set by a first cost so that prompts and answers keep ranks busy for a
share of the time that is said below: they hold on any machine. `--record FILE` only serves, and writes down what was
measured; `--replay FILE ...` only simulates what was written down.

Targets: mean error over the runs at most .05 for tokens/s, P50 of TTFT and TPOT, and KV use, .10 for P95; where two
systems differ by .05 or more in a figure, the same order. The null check: the simulator without the attention term must
miss the targets, or these say nothing.
"""

from __future__ import annotations

import argparse
import pickle
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common import SEED, arguments, finish, table
from sim_fit import Fitted, fit, with_shared_layers
from sim_runs import (
    ENGINE,
    HIDDEN,
    LAYERS,
    LONGEST,
    PAGE_BYTES,
    SAMPLE_S,
    Load,
    Recorded,
    System,
    TimedStep,
    played,
    recorded,
    save_attentive_model,
    serving,
)

import elastic
from elastic.bench.traces.trace import Trace, TraceRequest
from elastic.cluster.fleet.planning.policies import chosen
from elastic.planning.estimate.layer_cost import LayerCost
from elastic.planning.pipeline.chunk_cost import Chunk
from elastic.sim.core.fleet import RankModel
from elastic.sim.core.instance import EngineOptions, PlacePages
from elastic.sim.mechanisms.model import LayeredModel, Links
from elastic.sim.policies import Mechanisms
from elastic.sim.quantiles import QuantileSketch
from elastic.sim.report import Report
from elastic.sim.run import Run
from elastic.sim.scenario import FleetOptions, Scenario, SimulatedModel
from elastic.sim.workload import RequestSource

PLACES = {"roomy": "cpu#{}=256MiB", "tight": "cpu#{}=40MiB"}
OVERLOAD = elastic.Overload(pressure_ticks=2, queue_high_s=0.1, dwell_s=3.0)
SYSTEMS = {"one": System(1, 0.3), "two": System(2, 0.5), "drop": System(2, 0.5, OVERLOAD), "tp": System(2, 0.5, tp=2)}
"""In the first two requests wait until an instance has room for all that they may need."""
LINK_BYTES_S = 1e9
"""Between ranks: assumed; what a message takes besides is fitted to a run of its own."""
SECONDS, QUICK_S = 14.0, 6.0
LENGTHS = {  # median and sigma of the logarithm, of prompts and answers
    "conv": ((300.0, 0.8), (80.0, 0.5)),
    "code": ((800.0, 0.6), (20.0, 0.6)),
    "bursts": ((200.0, 0.7), (60.0, 0.5)),
}
FIGURES = ("tokens_per_s", "p50_ttft_s", "p50_tpot_s", "kv_use", "p95_ttft_s", "p95_tpot_s", "p99_ttft_s")
TARGETS = dict(zip(FIGURES, (0.05, 0.05, 0.05, 0.05, 0.10, 0.10, None), strict=True))
SEEDS = 5
LEAD_S = 1.0
ALONE = tuple(0.7 * number for number in range(9))
"""Seconds at which requests come that calibrate shared layers: each has ended before the next comes."""


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


@dataclass
class Measured:
    """What was served, and the steps of calibrations by name: by ranks alone, and with shared layers."""

    alone: dict[str, list[TimedStep]] = field(default_factory=dict)
    shared: dict[str, list[TimedStep]] = field(default_factory=dict)
    messages_s: list[float] = field(default_factory=list)
    """From the fleet to a rank: the tenth part of what requests wait for their first step, in each calibration."""
    runs: list[RealRun] = field(default_factory=list)

    def add(self, other: Measured) -> None:
        """Add what was measured another time."""
        self.alone |= other.alone
        self.shared |= other.shared
        self.messages_s += other.messages_s
        self.runs += other.runs


def calibration(seconds: float, ranks: int, seed: int) -> Trace:
    rates = [(seconds / 4, rate * ranks) for rate in (1.0, 4.0, 1.5, 2.0)]
    return Load("calibration", rates, (400.0, 0.8), (60.0, 0.6)).trace(seed)


def one_by_one() -> Trace:
    """Return requests of which each has ended before the next comes."""
    choose = random.Random(SEED)
    found = (TraceRequest(at_s, choose.randrange(40, 1500), choose.randrange(8, 24)) for at_s in ALONE)
    return Trace(tuple(found), "one by one", window=(0.0, ALONE[-1]))


class Served:
    """Serves, and writes down."""

    def __init__(self, path: Path, folder: Path, seconds: float) -> None:
        self.measured = Measured()
        self._path, self._folder, self._seconds = path, folder, seconds
        self._cost: LayerCost | None = None

    def serve(self, memory: str, system: str, loads: Sequence[str]) -> None:
        """Have a fleet serve requests of each kind, and before and after each such as calibrate.

        Where ranks share layers, or may drop some, they calibrate before they do; where they share, too when they do,
        by one request at a time.
        """
        name, chosen_one, measured = f"{system}, {memory}", SYSTEMS[system], self.measured
        folder = self._folder / name
        folder.mkdir()

        def calibrate(engine: elastic.Fleet, number: int = 0) -> str:
            trace, since_s = calibration(0.4 * self._seconds, chosen_one.ranks, SEED + number), time.perf_counter()
            measured.messages_s += played(engine, trace).queued_s.read(0.1)
            measured.alone[f"{name} {number}"] = recorded(folder, since_s)
            return f"{name} {number}"

        with serving(self._path, PLACES[memory], chosen_one, calibrate, step_budget=Recorded(folder)) as (
            engine,
            pages,
        ):
            shared, before = chosen_one.tp > 1, f"{name} 0"
            if shared:
                since_s = time.perf_counter()
                played(engine, one_by_one())
                measured.shared[before] = recorded(folder, since_s)
            self._cost = self._cost or fit(measured.alone).cost
            for number, load in enumerate(loads, 1):
                trace, since_s = self._trace(load, memory, chosen_one, pages), time.perf_counter()
                real = figures(played(engine, trace))
                steps = recorded(folder, since_s)
                after = before if shared or chosen_one.policy else calibrate(engine, number)
                calibrations = tuple(dict.fromkeys((before, after)))
                measured.runs.append(RealRun(name, load, memory, system, trace, pages, real, steps, calibrations))
                before = after
                print(f"{load}, {name}: {len(trace.requests)} requests", flush=True)

    def _trace(self, load: str, memory: str, system: System, pages: PlacePages) -> Trace:
        assert self._cost is not None
        seed = SEED + 1 + list(PLACES).index(memory)
        trace = load_of(load, system.busy, self._seconds, self._cost).trace(seed)
        blocks = (pages.budget - pages.weights) // LAYERS
        return trace.with_tokens(1.0, most=min(LONGEST, blocks * int(ENGINE["block_tokens"])) // 2)


def fitted_to(measured: Measured) -> dict[str, Fitted]:
    """Return costs with attention and without."""
    found = {}
    for name, attention in (("simulated", True), ("without attention", False)):
        each = fit(measured.alone, attention=attention)
        found[name] = with_shared_layers(each, measured.shared) if measured.shared else each
    return found


def load_of(name: str, busy: float, seconds: float, cost: LayerCost) -> Load:
    """Return arrivals to two ranks that keep each busy for a share of the time; bursts come at three times the rate."""
    (prompt, _), (answer, _) = LENGTHS[name]
    step = int(ENGINE["max_batch_tokens"])
    starts = range(0, int(prompt), step)
    prompt_s = sum(cost.batch([Chunk("", start, min(step, int(prompt) - start))]) for start in starts)
    beside = [Chunk("", int(prompt), 1)] * 4
    rate = 2 * busy / (prompt_s + answer * cost.batch(beside) / len(beside))
    if name != "bursts":
        return Load(name, [(seconds, rate)], *LENGTHS[name])
    calm, burst = (0.3 * seconds, 0.5 * rate), (0.2 * seconds, 3 * rate)
    return Load(name, [calm, burst, calm, burst], *LENGTHS[name])


def simulated(real: RealRun, fitted: Fitted, message_s: float) -> list[dict[str, float]]:
    """Return the figures of some runs of the simulator, each with other noise."""
    trace, system, fitted = later(real.trace), SYSTEMS[real.system], fitted.at_pace_of(real.calibrations)
    model = RankModel(
        EngineOptions(**ENGINE),
        real.pages,
        fitted.cost,
        fitted.steps,
        message_s,
        contention=fitted.contention,
        cut=fitted.cut,
    )
    links = Links(bytes_s=LINK_BYTES_S, hop_s=fitted.hop_s)
    layered = LayeredModel(model, system.tp, system.tp, PAGE_BYTES, 4 * HIDDEN, links=links)
    plain = system.policy is None and system.tp == 1
    mechanisms = None if plain else Mechanisms(chosen(system.policy), layered, tp=system.tp)
    runs = []
    for seed in range(SEEDS):
        scenario = Scenario(
            trace.source,
            trace.duration_s,
            (SimulatedModel(FleetOptions(system.ranks), model, mechanisms),),
            (RequestSource("r", None, None, trace),),
            samples=round(trace.duration_s / SAMPLE_S),
            seed=seed,
        )
        run = Run(scenario)
        run.play()
        run.report.samples = [sample for sample in run.report.samples if LEAD_S < sample.at_s <= trace.duration_s]
        runs.append(figures(run.report))
    return runs


def median(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in FIGURES}


def spread(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return by how much one run is off their median, in the mean: a real run is no surer than that."""
    middle = median(runs)
    return {name: statistics.mean(abs(run[name] / middle[name] - 1) for run in runs) for name in FIGURES}


def later(trace: Trace) -> Trace:
    """Return a trace that begins when ranks share their layers, as real ones do before requests come."""
    requests = tuple(replace(request, arrival_s=LEAD_S + request.arrival_s) for request in trace.requests)
    return replace(trace, requests=requests, window=(0.0, LEAD_S + trace.duration_s))


def figures(report: Report) -> dict[str, float]:
    def quantiles(name: str, of: QuantileSketch) -> dict[str, float]:
        return dict(zip((f"p50_{name}", f"p95_{name}", f"p99_{name}"), of.read(0.5, 0.95, 0.99), strict=True))

    use = statistics.mean(sample.kv_use for sample in report.samples)
    times = {**quantiles("ttft_s", report.ttft_s), **quantiles("tpot_s", report.tpot_s)}
    found = {"tokens_per_s": report.tokens_per_s, "kv_use": use, **times}
    return {name: found[name] for name in FIGURES}


def errors(run: Mapping[str, Any], name: str) -> dict[str, float]:
    """Return the relative errors of what a simulator says of a run."""
    return {figure: abs(run[name][figure] / run["real"][figure] - 1) for figure in FIGURES}


def judged(runs: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Return the mean error of each figure, which miss their targets, and pairs of systems in another order."""
    every = [errors(run, name) for run in runs]
    mean = {figure: statistics.mean(each[figure] for each in every) for figure in FIGURES}
    missed = [figure for figure, most in TARGETS.items() if most is not None and mean[figure] > most]
    return {"mean_error": mean, "missed": missed, "turned": turned(runs, name)}


def turned(runs: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    """Return the comparisons of two systems that come out the other way."""
    found = []
    for first in runs:
        for second in runs:
            if first["system"] >= second["system"] or any(first[k] != second[k] for k in ("load", "memory")):
                continue
            for figure in FIGURES[:4]:
                real = second["real"][figure] / first["real"][figure]
                told = second[name][figure] / first[name][figure]
                if abs(real - 1) >= 0.05 and (real > 1) != (told > 1):
                    found.append(f"{figure}: {first['system']} and {second['system']}, {first['load']}")
    return found


def compared(measured: Measured, fitted: Mapping[str, Fitted]) -> list[dict[str, Any]]:
    """Simulate all runs that were served."""
    runs, message_s = [], statistics.median(measured.messages_s)
    for real in measured.runs:
        run: dict[str, Any] = {"load": real.load, "memory": real.memory, "system": real.system, "real": real.figures}
        found = {name: simulated(real, each, message_s) for name, each in fitted.items()}
        run |= {name: median(each) for name, each in found.items()} | {"spread": spread(found["simulated"])}
        pace = fitted["simulated"].pace_over(real.calibrations, real.steps) if SYSTEMS[real.system].tp == 1 else 1.0
        runs.append({**run, "requests": len(real.trace.requests), "pace": pace})
        told = [f"{f} {run['real'][f]:.3g}/{run['simulated'][f]:.3g}" for f in FIGURES]
        print(f"{real.load}, {real.fleet}, real/simulated: {', '.join(told)}; pace {pace:.2f}", flush=True)
    return runs


def served(options: argparse.Namespace) -> Measured:
    """Serve all that was asked for; what was measured is written down after each fleet."""
    loads = options.loads[:2] if options.quick else options.loads
    with tempfile.TemporaryDirectory() as folder:
        path = save_attentive_model(Path(folder) / "model")
        found = Served(path, Path(folder), QUICK_S if options.quick else SECONDS)
        for memory in options.memory:
            for system in options.systems:
                found.serve(memory, system, loads)
                if options.record:
                    options.record.write_bytes(pickle.dumps(found.measured))
    return found.measured


def main() -> None:
    more = {
        "loads": {"nargs": "*", "choices": list(LENGTHS), "default": list(LENGTHS), "help": "kinds of requests"},
        "systems": {"nargs": "*", "choices": list(SYSTEMS), "default": list(SYSTEMS), "help": "systems to try"},
        "memory": {"nargs": "*", "choices": list(PLACES), "default": list(PLACES), "help": "room of ranks"},
        "record": {"type": Path, "help": "serve, write down what was measured, and end"},
        "replay": {"type": Path, "nargs": "*", "default": [], "help": "simulate what was written down"},
    }
    options = arguments(__doc__.splitlines()[0], **more)
    measured = Measured()
    for file in options.replay:
        measured.add(pickle.loads(file.read_bytes()))
    if not options.replay:
        measured = served(options)
    if options.record:
        return
    fitted = fitted_to(measured)
    runs = compared(measured, fitted)
    results = {name: judged(runs, name) for name in fitted}
    results["simulated"]["spread"] = {f: statistics.mean(run["spread"][f] for run in runs) for f in FIGURES}
    for name, each in fitted.items():
        results[name] |= {"step_error": each.error, "contention": each.contention, "paces": each.paces}
    rows = [
        [figure, *(f"{results[n]['mean_error'][figure]:.3f}" for n in fitted), TARGETS[figure]] for figure in FIGURES
    ]
    table(["mean error", *fitted, "target"], rows)
    for name in fitted:
        print(f"{name}: missed {results[name]['missed'] or 'nothing'}, turned {results[name]['turned'] or 'nothing'}")
    null_fails = bool(results["without attention"]["missed"] or results["without attention"]["turned"])
    finish("sim_validation", "cpu", {**results, "null_check_fails": null_fails, "runs": runs})


if __name__ == "__main__":
    main()
