"""The simulator held against real runs that it was not fitted to, and the same with attention left out of its costs.

    python benchmarks/sim_validation.py [--quick] [--loads conv code bursts] [--systems one two]

Ranks are pinned to a core each and serve a Llama in which attention takes as long as all else at 1,000 tokens. One run
of other requests calibrates: the seconds of every step that the ranks computed, with all that the engine does besides,
are fitted (`LayerCost`), and what is left is the noise. Then every kind of requests comes to every system, with memory
for about as many tokens as live on average and with plenty of it, and the same requests, at the same times, to the
simulator, five times with other noise, of which the median counts. Rates are set by the fitted cost so that prompts
and answers keep ranks busy for a share of the time that is said below: they hold on any machine.

Targets: mean error over the runs at most .05 for tokens/s, P50 of TTFT and TPOT, and KV use, .10 for P95; where two
systems differ by .05 or more in a figure, the same order. The null check: the simulator without the attention term must
miss the targets, or these say nothing.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import SEED, arguments, finish, table
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
    played,
    recorded,
    save_attentive_model,
    serving,
)

import elastic
from elastic.bench.traces.trace import Trace
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
from elastic.sim.scenario import FleetOptions, Scenario
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
MOST_FACTORS = 5000


@dataclass(frozen=True)
class Fitted:
    """What calibration gave."""

    cost: LayerCost
    factors: tuple[float, ...]
    """Seconds of steps over what the cost says."""
    message_s: float
    rest: float = 0.05
    """The share of a step's seconds that ranks which share layers do not share."""
    hop_s: float = 3e-4
    """An exchange of ranks that share layers."""

    @property
    def error(self) -> float:
        """The mean relative error of a step."""
        return statistics.mean(abs(1 / factor - 1) for factor in self.factors)


def calibrated(path: Path, folder: Path, seconds: float) -> dict[str, Fitted]:
    """Serve requests that are of no other run; return costs with attention and without."""
    folder.mkdir()
    rates = [(seconds / 4, rate) for rate in (0.5, 1.5, 3.0, 1.0)]
    load = Load("calibration", rates, (500.0, 0.8), (60.0, 0.6))
    with serving(path, PLACES["roomy"], SYSTEMS["two"], step_budget=Recorded(folder)) as (engine, _):
        report = played(engine, load.trace(SEED))
    samples = recorded(folder)
    (message_s,) = report.queued_s.read(0.1)
    found = {}
    for name, attention in (("simulated", True), ("without attention", False)):
        cost = LayerCost.fit(samples, block=ENGINE["block_tokens"], attention=attention)
        factors = tuple(s.seconds / cost.batch([Chunk("", *chunk) for chunk in s.chunks]) for s in samples)
        found[name] = Fitted(cost, factors[:: 1 + len(factors) // MOST_FACTORS], message_s)
    return found


def with_links(fitted: Mapping[str, Fitted], path: Path, folder: Path, seconds: float) -> dict[str, Fitted]:
    """Serve once more with shared layers; a straight line over seconds without tells what is not shared, and hops."""
    folder.mkdir()
    load = Load("calibration of links", [(seconds, 1.0)], (400.0, 0.8), (60.0, 0.6))
    with serving(path, PLACES["roomy"], SYSTEMS["tp"], step_budget=Recorded(folder)) as (engine, _):
        played(engine, load.trace(SEED))
    samples, found = recorded(folder), {}
    for name, each in fitted.items():
        alone = [each.cost.batch([Chunk("", *chunk) for chunk in sample.chunks]) for sample in samples]
        slope, once = statistics.linear_regression(alone, [sample.seconds for sample in samples])
        rest, hop_s = min(0.95, max(0.0, 2 * slope - 1)), max(0.0, once / (2 * LAYERS))
        found[name] = replace(each, rest=rest, hop_s=hop_s)
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


def simulated(trace: Trace, fitted: Fitted, pages: PlacePages, system: System) -> dict[str, float]:
    """Return the median figures of some runs of the simulator."""
    options = EngineOptions(**ENGINE)
    model = RankModel(options, pages, fitted.cost, noise=fitted.factors, message_s=fitted.message_s)
    links = Links(bytes_s=LINK_BYTES_S, hop_s=fitted.hop_s)
    layered = LayeredModel(model, system.tp, system.tp, PAGE_BYTES, 4 * HIDDEN, fitted.rest, links)
    plain = system.policy is None and system.tp == 1
    mechanisms = None if plain else Mechanisms(chosen(system.policy), layered, tp=system.tp)
    runs = []
    for seed in range(SEEDS):
        scenario = Scenario(
            trace.source,
            trace.duration_s,
            FleetOptions(system.ranks),
            model,
            (RequestSource("r", None, None, trace),),
            samples=round(trace.duration_s / SAMPLE_S),
            seed=seed,
            mechanisms=mechanisms,
        )
        run = Run(scenario)
        run.play()
        run.report.samples = [sample for sample in run.report.samples if sample.at_s <= trace.duration_s]
        runs.append(figures(run.report))
    return {name: statistics.median(run[name] for run in runs) for name in FIGURES}


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


def main() -> None:
    more = {
        "loads": {"nargs": "*", "choices": list(LENGTHS), "default": list(LENGTHS), "help": "kinds of requests"},
        "systems": {"nargs": "*", "choices": list(SYSTEMS), "default": list(SYSTEMS), "help": "systems to try"},
    }
    options = arguments(__doc__.splitlines()[0], **more)
    seconds = QUICK_S if options.quick else SECONDS
    loads = options.loads[:2] if options.quick else options.loads
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = save_attentive_model(Path(folder) / "model")
        fitted = calibrated(path, Path(folder) / "steps", 2 * seconds)
        if not {"drop", "tp"}.isdisjoint(options.systems):
            fitted = with_links(fitted, path, Path(folder) / "shared", seconds)
        for number, memory in enumerate(PLACES):
            for system in options.systems:
                for load in loads:
                    chosen_one, cost = SYSTEMS[system], fitted["simulated"].cost
                    trace = load_of(load, chosen_one.busy, seconds, cost).trace(SEED + 1 + number)
                    with serving(path, PLACES[memory], chosen_one) as (engine, pages):
                        blocks = (pages.budget - pages.weights) // LAYERS
                        trace = trace.with_tokens(1.0, most=min(LONGEST, blocks * int(ENGINE["block_tokens"])) // 2)
                        run: dict[str, Any] = {"load": load, "memory": memory, "system": system}
                        run["real"] = figures(played(engine, trace))
                    for name, each in fitted.items():
                        run[name] = simulated(trace, each, pages, chosen_one)
                    runs.append({**run, "requests": len(trace.requests), "blocks": blocks})
                    told = [f"{f} {run['real'][f]:.3g}/{run['simulated'][f]:.3g}" for f in FIGURES]
                    print(f"{load}, {memory}, {system}, real/simulated: {', '.join(told)}", flush=True)
    results = {name: judged(runs, name) for name in fitted}
    for name, each in fitted.items():
        results[name]["step_error"] = each.error
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
