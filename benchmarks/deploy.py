"""Deployments by intent: what estimates choose, what changes cost, and what measuring disturbs (iServe).

    python benchmarks/deploy.py [--only choice attainment re-plan harvest] [--models base ...]

choice: random models of three kinds are each deployed in every configuration that two places of this machine allow,
round after round in random order, so that a change of the machine's pace does not tell on one of them alone. Requests
come one at a time, and that is what is estimated: at a fixed rate they wait for one another on a slow machine alone.
For each intent, the configuration that estimates from fingerprints choose is compared with the one that is measured to
be best, round by round: its regret (median of the rounds; target: 5 % at most of nine in ten models and intents). What
ranks do to each other, by exchanges and by memory that they share, is measured, too, once; `regret with assumed links`
is that of the choice without. `distinct`: of how many of the four intents the choice is another one, of the model of
which that are most (target: 3). `others`: cores that other processes kept busy meanwhile. Beside them a stage that
waits for the other one is served sooner than a rank that always computes, so figures are void where they are more than
a few hundredths.
The others are of the first model. attainment: requests at a fifth of what one place computes, in what each intent
chooses, most TP, most PP and as loaded: the share of them within 2.5 to 7.5 times the latency of one that is alone as
loaded. re-plan: the intent changes again and again while requests arrive; none may be lost, what is reached must be
what was estimated to be best, and in no more than the seconds that were planned and those of one more action.
harvest: requests arrive at loads of a place from 10 to 60 %, by turns beside guests that measure fingerprints and
without; printed is the share of them that keeps their objectives (target: below 30 % 4 points less at most). Ranks are
processes.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import transformers
from common import arguments, finish, table
from deploy_served import Clocked, attainment, forced, harvest, replan
from estimate_shapes import save, shapes
from sim_runs import OthersWork

from elastic.cluster.deployment.deployed import Deployed
from elastic.cluster.deployment.deployments import Deployments
from elastic.cluster.fleet.profiling.guest import measure_two_ranks
from elastic.estimation.profile import measure_fingerprints
from elastic.estimation.profiles.store import ProfileStore
from elastic.planning.deployment.placing import Deployment
from elastic.planning.estimate.configuration import Configuration
from elastic.planning.estimate.intent import OBJECTIVES, Intent, Objective
from elastic.planning.estimate.performance import Load

FORMS = ("full", "int8")
PARTS = ("choice", "attainment", "re-plan", "harvest")
SELDOM = 0.01
"""Requests a second of which none waits for another."""
REQUESTS = 3
"""Of each configuration in a round."""
LOADS = (0.1, 0.2, 0.3, 0.4, 0.6)
"""Of a place, at which a guest measures beside it."""
MOST_REGRET = 0.05
STATIC = {"as loaded": Configuration(), "most TP": Configuration(tp=2), "most PP": Configuration(pp=2)}
LOAD, SHORT = Load(96, 32, 0.5), Load(96, 8)


def choice(deployed: Deployed, load: Load, clocked: Clocked, rounds: int) -> list[dict[str, Any]]:
    """Measure all configurations, and return the regret of what is chosen for each intent."""
    others = OthersWork([os.getpid(), *clocked.ranks])
    measured, estimated = measure(deployed, load, clocked, rounds, others), deployed.chooser.options(load, Intent())
    others_cores = others.cores
    seconds = {str(each.configuration): each.estimate.latency_s for each in estimated}
    chosen = chosen_for(deployed, load)
    profile = deployed.chooser.profile
    assert profile is not None
    deployed.chooser.use_profile(replace(profile, link=None, contention=0.0))
    without = chosen_for(deployed, load)
    deployed.chooser.use_profile(profile)
    rows = []
    for objective in OBJECTIVES:
        metrics = {each: [metric[objective] for metric in taken] for each, taken in measured.items()}
        least, regret = regret_of(chosen[objective], metrics)
        _, before = regret_of(without[objective], metrics)
        rows.append(
            {"intent": objective, "chosen": str(chosen[objective]), "best": str(least), "regret": regret}
            | {"chosen with assumed links": str(without[objective]), "regret with assumed links": before}
            | {"others": others_cores}
        )
    for each, taken in measured.items():
        median_s = statistics.median(metric["latency"] for metric in taken)
        print(f"{each}: estimated {seconds[str(each)]:.3f} s, measured {median_s:.3f} s")
    return rows


def chosen_for(deployed: Deployed, load: Load) -> dict[Objective, Configuration]:
    """Return the configuration that estimates choose for each intent."""
    found: dict[Objective, Configuration] = {}
    for objective in OBJECTIVES:
        best = deployed.best(load, Intent(objective))
        assert isinstance(best, Deployment)
        found[objective] = best.configuration
    return found


def measure(
    deployed: Deployed, load: Load, clocked: Clocked, rounds: int, others: OthersWork
) -> dict[Configuration, list[dict[Objective, float]]]:
    """Return for each configuration its metrics in each round, in which all are had in random order."""
    fitting = [each.configuration for each in deployed.chooser.options(load, Intent()) if each.estimate.fits]
    measured: dict[Configuration, list[dict[Objective, float]]] = {}
    for _ in range(rounds):
        for configuration in random.sample(fitting, len(fitting)):
            if not forced(deployed, configuration, load):
                continue
            clocked.seconds()
            latency_s = statistics.median(clocked.seconds() for _ in range(REQUESTS))
            others.add(clocked.ranks)
            nbytes = sum(deployed._book.reserved(deployed.name).values())
            metrics: dict[Objective, float] = {
                "latency": latency_s,
                "cost": latency_s * nbytes,
                "memory": nbytes,
                "gpu_hours": latency_s * configuration.ranks,
            }
            measured.setdefault(configuration, []).append(metrics)
    return measured


def regret_of(chosen: Configuration, metrics: Mapping[Configuration, Sequence[float]]) -> tuple[Configuration, float]:
    """Return the best configuration, in the median of rounds, and how much more the chosen one takes: in the median of
    each round's ratio, as both were measured at about the same pace there."""
    least = min(metrics, key=lambda each: statistics.median(metrics[each]))
    ratios = [mine / best for mine, best in zip(metrics[chosen], metrics[least], strict=True)]
    return least, statistics.median(ratios) - 1


def told(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the share of (model, intent) of little regret, and how many intents of one model choose differently."""
    every = [row for each in rows.values() for row in each]
    return {
        "regrets": sum(row["regret"] <= MOST_REGRET for row in every) / len(every),
        "distinct": max(len({row["chosen"] for row in each}) for each in rows.values()),
    }


def models(*, quick: bool) -> dict[str, Any]:
    """Return the configs of models, by name."""
    layers, hidden = (6, 256) if quick else (16, 768)
    base = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=1024,
    )  # fmt: skip
    return {"base": base, **{name: made for name, made in shapes(quick=quick).items() if not name.endswith("wide")}}


def measured(config: Any, parts: Sequence[str], rounds: int, *, quick: bool) -> dict[str, Any]:
    """Return what parts say of a model."""
    alone, results = replace(LOAD, rate=SELDOM), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        save(config, Path(folder))
        store = ProfileStore(folder)
        profile = measure_fingerprints(folder, FORMS, context=256, most_s=0.5 if quick else 3.0)
        store.save(folder, profile.with_links(measure_two_ranks()))
        fleets = {"beat_timeout_s": 20.0}
        made = Deployments("cpu#a=2GiB,cpu#b=2GiB", weights=FORMS, replanning=None, store=store, fleet=fleets)
        with made as fleet:
            fleet.deploy(folder, "latency", name="model", load=alone)
            deployed = fleet._named("model")
            clocked, seconds = Clocked(fleet["model"], LOAD, config.vocab_size), 8.0 if quick else 60.0
            if "choice" in parts:
                results["choice"] = choice(deployed, alone, clocked, rounds)
            if "attainment" in parts:
                chosen = {**STATIC, **chosen_for(deployed, alone)}
                results["attainment"] = attainment(
                    deployed, alone, clocked, chosen, 0.2, seconds if quick else 4 * seconds
                )
            if "re-plan" in parts:
                results["re-plan"] = replan(fleet, deployed, LOAD, clocked, 4 if quick else 20)
            if "harvest" in parts:
                fleet.intend("model", Intent("latency", quality_loss=0.0), load=LOAD)
                few = Clocked(fleet["model"], SHORT, config.vocab_size)
                pairs = 1 if quick else 3
                results["harvest"] = {
                    f"{load:.0%}": harvest(folder, FORMS, few, load, seconds, pairs) for load in LOADS
                }
    return results


def main() -> None:
    every = {"only": {"nargs": "+", "choices": PARTS, "default": PARTS, "help": "instead of all"}}
    every["models"] = {"nargs": "+", "default": None, "help": "instead of all; others than the first choose only"}
    options = arguments(__doc__.splitlines()[0], **every)
    configs = models(quick=options.quick)
    chosen = options.models or list(configs)
    if unknown := sorted({*chosen} - configs.keys()):
        raise SystemExit(f"--models {' '.join(unknown)}: there are {', '.join(configs)}")
    rounds, by_model = min(options.rounds, 1 if options.quick else 9), dict[str, dict[str, Any]]()
    for name in chosen:
        parts = [part for part in options.only if name == chosen[0] or part == "choice"]
        if parts:
            print(f"-- {name}")
            by_model[name] = measured(configs[name], parts, rounds, quick=options.quick)
            show_results(by_model[name])
    results: dict[str, Any] = {**by_model[chosen[0]]}
    if choices := {name: each["choice"] for name, each in by_model.items() if "choice" in each}:
        results["choice"] = {**choices, "told": told(choices)}
        print("regret of 5 % at most: {regrets:.0%}; distinct choices of a model: {distinct}".format(**told(choices)))
    finish("deploy", options.device, results)


def show_results(results: dict[str, Any]) -> None:
    """Print a table of each part that was run."""
    if chosen := results.get("choice"):
        rows = [
            [f"{value:.1%}" if isinstance(value, float) else value for key, value in row.items() if key != "others"]
            for row in chosen
        ]
        table(["intent", "chosen", "best measured", "regret", "with assumed links", "regret"], rows)
        print(f"others kept {chosen[0]['others']:.2f} cores busy")
    for title in ("attainment", "harvest"):
        if by_name := results.get(title):
            header = list(next(iter(by_name.values())))
            table([title, *header], [[name, *(f"{row[key]:.4g}" for key in header)] for name, row in by_name.items()])
    if row := results.get("re-plan"):
        shown = {key: value if isinstance(value, str) else f"{value:.4g}" for key, value in row.items()}
        table(["re-plan", ""], [list(pair) for pair in shown.items()])


if __name__ == "__main__":
    main()
