"""The simulator held against real runs that it was not fitted to, and the same with attention left out of its costs.

    python benchmarks/sim_validation.py [--quick] [--loads conv code bursts] [--systems one two] [--memory tight]

Ranks are pinned to a core each and serve a Llama in which attention takes as long as all else at 1,000 tokens. Each
fleet serves requests of no run first, of which the seconds of every step that the ranks computed are written down;
these calibrate (`sim_fit.py`). Then every kind of requests comes to every system, three times, with memory for about as
many tokens as live on average and with plenty of it (`sim_served.py`), and each time the same requests, at the same
times, to the simulator, five times with other noise. Of each figure the medians count, of what was served and of what
was simulated; `again` is how far what was served is off its own median, in the mean. Rates are set by a first cost so
that prompts and answers keep ranks busy for a share of the time: they hold on any machine. `--record FILE` only serves,
and writes down what was measured; `--replay FILE ...` only simulates what was written down.

What is off may be the schedule, or the seconds. So ranks are simulated, too, that are as fast at each moment as the
real ones were: by each of their steps, which leaves the schedule, and in the mean of each second, which leaves the
schedule and what steps cost beside each other. Not those that share layers: their steps wait for each other.

Targets: mean error over the runs at most .05 for tokens/s, P50 of TTFT and TPOT, and KV use, .10 for P95; where two
systems differ by .05 or more in a figure, the same order; and in every run (`sim_behaviour.py`) as many actions but for
one, each within a second of the real one, the share of bubbles of two stages within .03, and the seconds of a step that
two ranks share within .05. In the runs of two of the systems a rank is killed. Each simulator has a null: the same
without the attention term, or with batches of a fourth of the tokens. The targets tell the two apart only where the
simulator meets all of them and its null does not; `verdicts` says both.
"""

from __future__ import annotations

import argparse
import math
import pickle
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from common import arguments, finish, table
from sim_behaviour import LIMITS, Behaviour, above_limits, actions, bubble_share, most_off, off
from sim_fit import Fitted, fit, messages_s, with_home
from sim_runs import (
    ENGINE,
    HIDDEN,
    PAGE_BYTES,
    SAMPLE_S,
    save_attentive_model,
)
from sim_served import (
    FIGURES,
    LENGTHS,
    PLACES,
    QUICK_S,
    SECONDS,
    SYSTEMS,
    Measured,
    RealRun,
    Served,
    figures,
)
from sim_shared import with_shared_layers
from sim_stages import with_stages

from elastic.bench.traces.trace import Trace
from elastic.cluster.fleet.planning.policies import chosen
from elastic.sim.core.fleet import RankModel
from elastic.sim.core.host import ALONE
from elastic.sim.core.instance import EngineOptions
from elastic.sim.mechanisms.fleet import ElasticFleet
from elastic.sim.mechanisms.model import LayeredModel, Links
from elastic.sim.policies import Fault, Mechanisms
from elastic.sim.run import Run
from elastic.sim.scenario import FleetOptions, Scenario, SimulatedModel
from elastic.sim.workload import RequestSource

TARGETS = dict(zip(FIGURES, (0.05, 0.05, 0.05, 0.05, 0.10, 0.10, None, None), strict=True))
SEEDS = 5
LEAD_S = 1.0
PACED = {
    "each step's pace": ("simulated", 0.0, 1),
    "other schedule": ("simulated", 0.0, 4),
    "each second's pace": ("simulated", 1.0, 1),
    "it without attention": ("without attention", 1.0, 1),
}
"""Simulators whose ranks are as fast as the real ones were then: with which costs, for how long at a mean pace, and by
how much smaller batches are."""
NULLS = {
    "simulated": "without attention",
    "each step's pace": "other schedule",
    "each second's pace": "it without attention",
}
"""Simulator -> what is known to be wrong, and must fail where it passes."""


@dataclass(frozen=True)
class Simulated:
    """What came of a run of the simulator."""

    figures: dict[str, float]
    behaviour: Behaviour


def fitted_to(measured: Measured) -> dict[str, Fitted]:
    """Return costs with attention and without."""
    found = {}
    frontend_s = statistics.median(measured.frontends_s) if measured.frontends_s else 0.0
    together = measured.shared | {name: [*s.steps, *s.pairs, *s.several] for name, s in measured.staged.items()}
    for name, attention in (("simulated", True), ("without attention", False)):
        each = with_home(fit(measured.alone, frontend_s, attention=attention), together)
        each = with_shared_layers(each, measured.shared) if measured.shared else each
        found[name] = with_stages(each, measured.staged) if measured.staged else each
    return found


def simulated(real: RealRun, fitted: Fitted, message_s: float) -> list[Simulated]:
    """Return some runs of the simulator, each with other noise."""
    fitted = fitted.at_pace_of(real.calibrations)
    model = rank_model(real, fitted, message_s)
    return [simulated_once(real, model, fitted, seed) for seed in range(SEEDS)]


def simulated_paced(real: RealRun, fitted: Fitted, message_s: float, within_s: float, smaller: int) -> Simulated:
    """Return a run in which each rank is as fast as the real one was then; see `PACED`."""
    fitted = fitted.at_pace_of(real.calibrations)
    paces = fitted.paces_of(real.steps, real.begin_s - LEAD_S, within_s)
    waited_s = messages_s([real.begin_s + request.arrival_s for request in real.trace.requests], real.steps)
    message_s = statistics.median(waited_s) if waited_s else message_s
    named = {f"r{number}": paces[pid] for number, pid in enumerate(real.ranks) if pid in paces}
    model = replace(rank_model(real, fitted, message_s), sharing=ALONE, paces=named)
    options = replace(model.engine, max_batch_tokens=model.engine.max_batch_tokens // smaller)
    return simulated_once(real, replace(model, engine=options), fitted)


def rank_model(real: RealRun, fitted: Fitted, message_s: float) -> RankModel:
    shares = SYSTEMS[real.system].tp > 1  # what stages take from each other is in what exchanges were fitted to
    return RankModel(
        EngineOptions(**ENGINE),
        real.pages,
        fitted.cost,
        fitted.steps,
        message_s,
        sharing=replace(fitted.sharing, stages=0.0) if shares else fitted.sharing,
        cut=fitted.cut,
        behind_prompt=fitted.behind_prompt,
    )


def simulated_once(real: RealRun, model: RankModel, fitted: Fitted, seed: int = 0) -> Simulated:
    trace, system = later(real.trace), SYSTEMS[real.system]
    shared = Links(fitted.stage_links.bytes_s, fitted.hop_s, fitted.core_s)
    links = shared if system.tp > 1 else fitted.stage_links
    home = {"beside_s": fitted.beside_s, "beside_chunk_s": fitted.beside_chunk_s}
    layered = LayeredModel(model, system.tp, system.tp, PAGE_BYTES, 4 * HIDDEN, links=links, **home)
    plain = system.policy is None and system.alone and system.kill is None
    faults = () if real.kill_s is None else (Fault(LEAD_S + real.kill_s, "kill", 1),)
    mechanisms = Mechanisms(
        chosen(system.policy), layered, tp=system.tp, stages=system.stages, faults=faults, moves=bool(faults)
    )
    scenario = Scenario(
        trace.source,
        trace.duration_s,
        (SimulatedModel(FleetOptions(system.ranks), model, None if plain else mechanisms),),
        (RequestSource("r", None, None, trace),),
        samples=round(trace.duration_s / SAMPLE_S),
        seed=seed,
    )
    run = Run(scenario)
    steps_s = seconds_of_steps(run)
    run.play()
    run.report.samples = [sample for sample in run.report.samples if LEAD_S < sample.at_s <= trace.duration_s]
    done = actions(((each.kind, each.at_s - LEAD_S) for each in run.report.actions), real.trace.duration_s)
    step_s = statistics.mean(steps_s) if steps_s else None
    return Simulated(figures(run.report), Behaviour(done, bubble_share(run.report.stages.values()), step_s))


def seconds_of_steps(run: Run) -> list[float]:
    """Return a list that will have the seconds of each step of which several ranks compute layers."""
    found: list[float] = []

    def noted(execute: Any, step: Any) -> Any:
        begin_s, future = run.clock.now, execute(step)
        future.add_done_callback(lambda done: None if done.exception() else found.append(run.clock.now - begin_s))
        return future

    for fleet in run.fleets:
        for rank in fleet.world.ranks.values() if isinstance(fleet, ElasticFleet) else ():
            rank.steps.execute = partial(noted, rank.steps.execute)  # type: ignore[method-assign]
    return found


def median(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in FIGURES}


def spread(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return by how much one run is off their median, in the mean: nobody can predict it better."""
    middle = median(runs)
    return {name: statistics.mean(abs(run[name] / middle[name] - 1) for run in runs) for name in FIGURES}


def later(trace: Trace) -> Trace:
    """Return a trace that begins when ranks share their layers, as real ones do before requests come."""
    requests = tuple(replace(request, arrival_s=LEAD_S + request.arrival_s) for request in trace.requests)
    return replace(trace, requests=requests, window=(0.0, LEAD_S + trace.duration_s))


def errors(run: Mapping[str, Any], name: str) -> dict[str, float]:
    """Return the relative errors of what a simulator says of a run."""
    return {figure: abs(run[name][figure] / run["real"][figure] - 1) for figure in FIGURES}


def judged(runs: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Return the mean error of each figure, by how much the worst run behaves otherwise, which of these miss their
    targets, and pairs of systems in another order."""
    every = [errors(run, name) for run in runs]
    mean = {figure: statistics.mean(each[figure] for each in every) for figure in FIGURES}
    missed = [figure for figure, most in TARGETS.items() if most is not None and mean[figure] > most]
    off = most_off([run["off"][name] for run in runs])
    return {"mean_error": mean, "off": off, "missed": missed + above_limits(off), "turned": turned(runs, name)}


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
                if abs(real - 1) >= 0.05 and (real - 1) * (told - 1) <= 0:
                    found.append(f"{figure}: {first['system']} and {second['system']}, {first['load']}")
    return found


def verdicts(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, bool]]:
    """Return for each simulator that was judged whether it passes, whether its null fails, and whether both do so.

    To pass is to miss no target and to turn no comparison.
    """
    passes = {name: not (each["missed"] or each["turned"]) for name, each in results.items()}
    return {
        name: {
            "simulator_passes": passes[name],
            "null_fails": not passes[null],
            "tells_simulator_from_null": passes[name] and not passes[null],
        }
        for name, null in NULLS.items()
        if name in passes
    }


def compared(measured: Measured, fitted: Mapping[str, Fitted]) -> list[dict[str, Any]]:
    """Simulate all that was served; what was served several times counts by its medians, as simulations of it do."""
    served: dict[tuple[str, str, str], list[RealRun]] = {}
    for real in measured.runs:
        served.setdefault((real.load, real.memory, real.system), []).append(real)
    message_s = statistics.median(measured.messages_s)
    runs = []
    for (load, memory, system), reals in served.items():
        found = [all_simulated(real, fitted, message_s) for real in reals]
        names = list(found[0])
        run: dict[str, Any] = {"load": load, "memory": memory, "system": system}
        run["real"] = median([real.figures for real in reals])
        if len(reals) > 1:
            run["again"] = spread([real.figures for real in reals])
        run |= {name: median([told.figures for each in found for told in each[name]]) for name in names}
        run["spread"] = spread([told.figures for told in found[0]["simulated"]])
        behaved = [real.behaviour for real in reals]
        run["off"] = {name: off(behaved, [[t.behaviour for t in each[name]] for each in found]) for name in names}
        run["behaved"] = [
            {"real": vars(real.behaviour), **{name: vars(told[0].behaviour) for name, told in each.items()}}
            for real, each in zip(reals, found, strict=True)
        ]
        if names[-1] in PACED:
            run["paces"] = [fitted["simulated"].pace_over(real.calibrations, real.steps) for real in reals]
        runs.append({**run, "requests": len(reals[0].trace.requests), "others": [real.others for real in reals]})
        told = ["real", "simulated", *(name for name in PACED if name in NULLS and name in names)]
        each = [f"{f} " + "/".join(f"{run[name][f]:.3g}" for name in told) for f in FIGURES]
        print(f"{load}, {reals[0].fleet}, {'/'.join(told)}: {', '.join(each)}", flush=True)
    return runs


def all_simulated(real: RealRun, fitted: Mapping[str, Fitted], message_s: float) -> dict[str, list[Simulated]]:
    """Return the runs of each simulator."""
    found = {name: simulated(real, each, message_s) for name, each in fitted.items()}
    if SYSTEMS[real.system].policy is None and SYSTEMS[real.system].alone:  # no step waits for other ranks
        for name, (costs, within_s, smaller) in PACED.items():
            found[name] = [simulated_paced(real, fitted[costs], message_s, within_s, smaller)]
    return found


def served(options: argparse.Namespace) -> Measured:
    """Serve all that was asked for; what was measured is written down after each fleet."""
    loads = options.loads[:2] if options.quick else options.loads
    with tempfile.TemporaryDirectory() as folder:
        path = save_attentive_model(Path(folder) / "model")
        found = Served(path, Path(folder), QUICK_S if options.quick else SECONDS, options.tries)
        for memory in options.memory:
            for system in options.systems:
                found.serve(memory, system, loads, options.repeats)
                if options.record:
                    options.record.write_bytes(pickle.dumps(found.measured))
    return found.measured


def main() -> None:
    more = {
        "loads": {"nargs": "*", "choices": list(LENGTHS), "default": list(LENGTHS), "help": "kinds of requests"},
        "systems": {"nargs": "*", "choices": list(SYSTEMS), "default": list(SYSTEMS), "help": "systems to try"},
        "memory": {"nargs": "*", "choices": list(PLACES), "default": list(PLACES), "help": "room of ranks"},
        "repeats": {"type": int, "default": 3, "help": "how often each kind is served"},
        "tries": {"type": int, "default": 1, "help": "how often to serve what other processes disturb"},
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
    paced = [run for run in runs if "paces" in run]
    results |= {name: judged(paced, name) for name in PACED if paced}
    for what in ("spread", "again"):
        told = [run[what] for run in runs if what in run]
        if told:
            results["simulated"][what] = {f: statistics.mean(each[f] for each in told) for f in FIGURES}
    for name, each in fitted.items():
        results[name] |= {"step_error": each.error, "sharing": vars(each.sharing), "paces": each.paces}
    rows = [
        [figure, *(f"{each['mean_error'][figure]:.3f}" for each in results.values()), TARGETS[figure]]
        for figure in FIGURES
    ]
    table(["mean error", *results, "target"], rows)
    rows = [
        [name, *(f"{each['off'].get(name, math.nan):.3f}" for each in results.values()), LIMITS[name]]
        for name in LIMITS
    ]
    table(["worst run is off by", *results, "target"], rows)
    for name in results:
        print(f"{name}: missed {results[name]['missed'] or 'nothing'}, turned {results[name]['turned'] or 'nothing'}")
    found = verdicts(results)
    for name, verdict in found.items():
        print(f"{name}, null {NULLS[name]}: {', '.join(f'{what} {holds}' for what, holds in verdict.items())}")
    finish("sim_validation", "cpu", {**results, "verdicts": found, "runs": runs})


if __name__ == "__main__":
    main()
