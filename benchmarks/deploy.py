"""Deployments by intent: what estimates choose, what changes cost, and what measuring disturbs (iServe).

    python benchmarks/deploy.py [--only choice re-plan harvest]

choice: a random model is deployed in every configuration that two places of this machine allow, round after round in
random order, so that a change of the machine's pace does not tell on one of them alone. Requests come one at a time,
and that is what is estimated: at a fixed rate they wait for one another on a slow machine alone. For each intent, the
configuration that estimates from fingerprints choose is compared with the one that is measured to be best, round by
round: its regret (median of the rounds; target: 5 %). What ranks do to each other, by exchanges and by memory that they
share, is measured, too, once; `regret with assumed links` is that of the choice without. `others`: cores that other
processes kept busy meanwhile. Beside them a stage that waits for the other one is served sooner than a rank that always
computes, so figures are void where they are more than a few hundredths.
re-plan: the intent changes again and again while requests arrive; none may be lost, and what is reached must be
what was estimated to be best. harvest: requests arrive at a load below 30 % of a place, by turns beside a guest that
measures fingerprints and without one; printed is the share of them that keeps their objectives (target: 4 points less
at most). Ranks are processes.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from common import SEED, arguments, finish, table
from sim_runs import OthersWork

from elastic.cluster.deployment.choice import settled
from elastic.cluster.deployment.deployed import Deployed
from elastic.cluster.deployment.deployments import Deployments
from elastic.cluster.fleet.profiling.guest import measure_two_ranks
from elastic.engines.base import Output, Request
from elastic.estimation.profile import measure_fingerprints
from elastic.estimation.profiles.guest import ProfilingProcess
from elastic.estimation.profiles.store import ProfileStore
from elastic.planning.deployment.placing import Deployment, place
from elastic.planning.estimate.configuration import Configuration
from elastic.planning.estimate.intent import Intent, Objective
from elastic.planning.estimate.performance import Load

FORMS = ("full", "int8")
PARTS = ("choice", "re-plan", "harvest")
SELDOM = 0.01
"""Requests a second of which none waits for another."""
REQUESTS = 3
"""Of each configuration in a round."""
OBJECTIVES: tuple[Objective, ...] = ("latency", "cost", "memory", "gpu_hours")
SLACK = 2.5
"""An objective is so many times the median without a guest."""


class Clocked:
    """Sends requests to a fleet, and notes when each has its tokens."""

    def __init__(self, fleet: Any, load: Load, vocabulary: int) -> None:
        self.fleet, self._load, self._vocabulary = fleet, load, vocabulary
        self._choose = random.Random(SEED)
        self._changed = threading.Condition()
        self.told: dict[str, list[float]] = {}
        self.ended: dict[str, str] = {}

    @property
    def ranks(self) -> list[int]:
        """The process ids of the ranks that serve."""
        return [rank.pid for rank in self.fleet.status().ranks if rank.serves]

    def send(self) -> str:
        prompt = tuple(self._choose.randrange(3, self._vocabulary) for _ in range(self._load.prompt))
        request = Request(prompt, self._load.new)
        self.told[request.id] = [time.perf_counter()]
        self.fleet.submit(request, self._hear)
        return request.id

    def seconds(self) -> float:
        """Send one request by itself, and return how long it takes."""
        request = self.send()
        self.wait()
        times = self.told[request]
        return times[-1] - times[0]

    def wait(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.ended) == len(self.told), 300), "requests are lost"

    def run(self, rate: float, seconds: float) -> list[tuple[float, float]]:
        """Send requests at random times; return TTFT and TPOT of each when all have ended."""
        sent, until_s = [], time.perf_counter() + seconds
        while time.perf_counter() < until_s:
            time.sleep(self._choose.expovariate(rate))
            sent.append(self.send())
        self.wait()
        return [_latencies(self.told[request]) for request in sent]

    def _hear(self, output: Output) -> None:
        with self._changed:
            self.told[output.request] += [time.perf_counter()] * len(output.tokens)
            if output.finish is not None:
                self.ended[output.request] = output.finish
                self._changed.notify_all()


def _latencies(times: Sequence[float]) -> tuple[float, float]:
    arrived, first, *_, last = times
    return first - arrived, (last - first) / max(1, len(times) - 2)


def forced(deployed: Deployed, configuration: Configuration, load: Load) -> bool:
    """Have a deployment be in a configuration; return whether it can be."""
    found = [each for each in deployed.chooser.options(load, Intent()) if each.configuration == configuration]
    states = deployed._book.states(deployed.name, deployed.chooser.kept_bytes())
    placed = place(found, states, "packing")
    if not isinstance(placed, Deployment):
        return False
    placed = settled(found[0], placed, states)
    deployed.chooser.choose = lambda *_, **__: placed  # type: ignore[method-assign]
    try:
        deployed.change(Intent(), load)
    finally:
        del deployed.chooser.choose  # type: ignore[method-assign]
    return True


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


def replan(fleet: Deployments, deployed: Deployed, load: Load, clocked: Clocked, changes: int) -> dict[str, Any]:
    """Change the intent again and again under requests; return what was lost, and whether the best was reached."""
    before, sender = len(clocked.told), threading.Thread(target=clocked.run, args=(3.0, 1.5 * changes))
    sender.start()
    reached, told = [], []
    for number in range(changes):
        intent = Intent(OBJECTIVES[number % 2 * 2], quality_loss=None if number % 2 else 0.0)
        told.append(fleet.intend(deployed.name, intent, load=load))
        best = deployed.best(load, intent)
        reached.append(isinstance(best, Deployment) and deployed.observed() == best.configuration)
        time.sleep(1.0)
    sender.join()
    lost = sum(1 for request in list(clocked.told)[before:] if clocked.ended.get(request) != "length")
    longest = max(told, key=lambda each: each.seconds)
    return {
        "requests": len(clocked.told) - before,
        "lost": lost,
        "reached": sum(reached) / len(reached),
        "change_s": statistics.median(each.seconds for each in told if each.status == "applied"),
        "longest_s": longest.seconds,
        "longest": f"{longest.before} to {longest.after}, {[step.kind for step in longest.steps]}",
    }


def harvest(path: str, clocked: Clocked, rate: float, seconds: float, pairs: int) -> dict[str, Any]:
    """Serve by turns with and without a guest; return which share of requests keeps its objectives."""
    alone: list[tuple[float, float]] = []
    beside: list[tuple[float, float]] = []
    for _ in range(pairs):
        alone += clocked.run(rate, seconds)
        guest = ProfilingProcess(path, FORMS, "cpu", context=256, share=0.2)
        beside += clocked.run(rate, seconds)
        guest.cancel()
    ttft_s, tpot_s = (SLACK * statistics.median(each) for each in zip(*alone, strict=True))

    def kept(told: Sequence[tuple[float, float]]) -> float:
        return sum(first <= ttft_s and each <= tpot_s for first, each in told) / len(told)

    return {"requests": len(beside), "alone": kept(alone), "beside": kept(beside), "points": kept(alone) - kept(beside)}


def main() -> None:
    parts = {"only": {"nargs": "+", "choices": PARTS, "default": PARTS, "help": "instead of all"}}
    options = arguments(__doc__.splitlines()[0], **parts)
    layers, hidden, rounds = (6, 256, 3) if options.quick else (16, 768, 9)
    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=1024,
    )  # fmt: skip
    load, alone = Load(96, 32, 0.5), Load(96, 32, SELDOM)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        transformers.AutoModelForCausalLM.from_config(config).eval().save_pretrained(folder)
        store = ProfileStore(folder)
        profile = measure_fingerprints(folder, FORMS, context=256, most_s=0.5 if options.quick else 3.0)
        store.save(folder, profile.with_links(measure_two_ranks()))
        devices = "cpu#a=1GiB,cpu#b=1GiB"
        options_of_fleets = {"beat_timeout_s": 20.0}
        made = Deployments(devices, weights=FORMS, replanning=None, store=store, fleet=options_of_fleets)
        with made as fleet:
            fleet.deploy(folder, "latency", name="model", load=alone)
            deployed = fleet._named("model")
            clocked = Clocked(fleet["model"], load, config.vocab_size)
            if "choice" in options.only:
                results["choice"] = choice(deployed, alone, clocked, rounds)
            if "re-plan" in options.only:
                results["re-plan"] = replan(fleet, deployed, load, clocked, 4 if options.quick else 20)
            if "harvest" in options.only:
                fleet.intend("model", Intent("latency", quality_loss=0.0), load=load)
                rate = 0.2 / clocked.seconds()
                results["harvest"] = harvest(
                    folder, clocked, rate, 8.0 if options.quick else 60.0, 1 if options.quick else 3
                )
    show_results(results)
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
    for title in ("re-plan", "harvest"):
        if title in results:
            shown = {
                key: f"{value:.4g}" if not isinstance(value, str) else value for key, value in results[title].items()
            }
            table([title, ""], [list(pair) for pair in shown.items()])


if __name__ == "__main__":
    main()
