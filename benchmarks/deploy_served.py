"""What deployments do to requests that are served meanwhile: changes of the intent, objectives, guests that measure."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from common import SEED

from elastic.cluster.deployment.choice import settled
from elastic.cluster.deployment.deployed import Deployed
from elastic.cluster.deployment.deployments import Deployments
from elastic.cluster.deployment.status import Replanned
from elastic.engines.base import Output, Request
from elastic.estimation.profiles.guest import ProfilingProcess
from elastic.planning.deployment.placing import Deployment, place
from elastic.planning.estimate.configuration import Configuration
from elastic.planning.estimate.intent import Intent, Objective
from elastic.planning.estimate.performance import Load

IN_TURN: tuple[Objective, ...] = ("latency", "memory", "gpu_hours", "cost")
"""Intents that follow each other; every other one allows no loss of quality."""
SCALES = (2.5, 5.0, 7.5)
"""Objectives: a request may take so many times as long as one that is alone in full weights on one rank."""
SLACK = 2.5
"""An objective is so many times the median without a guest."""
LOOK_S = 0.2


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

    def alone_s(self) -> float:
        """Return how long a request takes that is alone."""
        self.seconds()
        return statistics.median(self.seconds() for _ in range(3))

    def wait(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.ended) == len(self.told), 300), "requests are lost"

    def run(self, rate: float, seconds: float) -> list[tuple[float, float, float]]:
        """Send requests at random times; return TTFT, TPOT and latency of each when all have ended."""
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


def _latencies(times: Sequence[float]) -> tuple[float, float, float]:
    arrived, first, *_, last = times
    return first - arrived, (last - first) / max(1, len(times) - 2), last - arrived


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


def replan(fleet: Deployments, deployed: Deployed, load: Load, clocked: Clocked, changes: int) -> dict[str, Any]:
    """Change the intent again and again under requests; return what was lost, and what was reached, how late."""
    before, sender = len(clocked.told), threading.Thread(target=clocked.run, args=(3.0, 1.5 * changes))
    sender.start()
    reached: list[bool] = []
    told: list[tuple[Replanned, Replanned]] = []
    for number in range(changes):
        intent = Intent(IN_TURN[number % len(IN_TURN)], quality_loss=None if number % 2 else 0.0)
        planned = fleet.intend(deployed.name, intent, load=load, dry_run=True)
        told.append((planned, fleet.intend(deployed.name, intent, load=load)))
        best = deployed.best(load, intent)
        reached.append(isinstance(best, Deployment) and deployed.observed() == best.configuration)
        time.sleep(1.0)
    sender.join()
    lost = sum(1 for request in list(clocked.told)[before:] if clocked.ended.get(request) != "length")
    return {
        "requests": len(clocked.told) - before,
        "lost": lost,
        "reached": sum(reached) / len(reached),
        **lateness(told),
    }


def lateness(told: Sequence[tuple[Replanned, Replanned]]) -> dict[str, Any]:
    """Return what changes took beside what was planned of each: within one action's worth they took no longer than that
    and its longest step."""
    applied = [(planned, done) for planned, done in told if done.status == "applied"]
    if not applied:
        return {"changes": 0}
    worth = [max(step.seconds for step in planned.steps) for planned, _ in applied]
    late = [done.seconds - planned.seconds for planned, done in applied]
    longest = max((done for _, done in applied), key=lambda each: each.seconds)
    return {
        "changes": len(applied),
        "planned_s": statistics.median(planned.seconds for planned, _ in applied),
        "change_s": statistics.median(done.seconds for _, done in applied),
        "within one action": sum(over <= most for over, most in zip(late, worth, strict=True)) / len(applied),
        "longest_s": longest.seconds,
        "longest": f"{longest.before} to {longest.after}, {[step.kind for step in longest.steps]}",
    }


def attainment(
    deployed: Deployed, load: Load, clocked: Clocked, chosen: Mapping[str, Configuration], share: float, seconds: float
) -> dict[str, dict[str, float]]:
    """Serve in each configuration at so large a load of a place; return which shares of requests keep objectives, and
    what each place serves."""
    names: dict[Configuration, list[str]] = {}
    for name, configuration in chosen.items():
        names.setdefault(configuration, []).append(name)
    forced(deployed, Configuration(), load)
    alone_s, rows = clocked.alone_s(), dict[str, dict[str, float]]()
    for configuration, own in names.items():
        if not forced(deployed, configuration, load):
            continue
        clocked.seconds()
        taken_s = [last_s for *_, last_s in clocked.run(share / alone_s, seconds)]
        kept = {f"within {scale:g} x": share_below(taken_s, scale * alone_s) for scale in SCALES}
        rows[f"{configuration} ({', '.join(own)})"] = {**kept, "requests a place": len(taken_s) / configuration.ranks}
    return rows


def share_below(values: Sequence[float], most: float) -> float:
    """Return the share of values that are at most so large."""
    return sum(value <= most for value in values) / len(values)


@contextmanager
def guests(path: str, forms: Sequence[str]) -> Iterator[None]:
    """Have a guest measure all the time: behind one that has ended the next one begins."""

    def measure() -> None:
        guest = ProfilingProcess(path, forms, "cpu", context=256, share=0.2)
        while not ended.wait(LOOK_S):
            if guest.ended:
                guest.cancel()
                guest = ProfilingProcess(path, forms, "cpu", context=256, share=0.2)
        guest.cancel()

    ended, thread = threading.Event(), threading.Thread(target=measure)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def harvest(
    path: str, forms: Sequence[str], clocked: Clocked, share: float, seconds: float, pairs: int
) -> dict[str, Any]:
    """Serve at so large a load by turns with guests and without; return which share of requests keeps objectives."""
    rate = share / clocked.alone_s()
    alone: list[tuple[float, ...]] = []
    beside: list[tuple[float, ...]] = []
    for _ in range(pairs):
        alone += clocked.run(rate, seconds)
        with guests(path, forms):
            beside += clocked.run(rate, seconds)
    ttft_s, tpot_s, _ = (SLACK * statistics.median(each) for each in zip(*alone, strict=True))

    def kept(told: Sequence[tuple[float, ...]]) -> float:
        return sum(first <= ttft_s and each <= tpot_s for first, each, _ in told) / len(told)

    return {"requests": len(beside), "alone": kept(alone), "beside": kept(beside), "points": kept(alone) - kept(beside)}
