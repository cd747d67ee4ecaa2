"""A burst that needs more KV cache than two instances have: what requests wait for, by what is done about it.

    python benchmarks/overload.py [--systems NAME …] [--rounds 5]

Two ranks, pinned to a core each, serve the Llama of 40M parameters of `serving.py`. Requests come as a Poisson process,
in a burst four times as often; the mean KV they need is below 60 % of what both instances have, in the burst it is
above. Each round plays one trace to all systems, in random order, with fresh processes:

- `wait`: a request waits until one of the instances has room for it
- `migrate`: besides, requests move to the instance that has more room (Llumnix)
- `pipeline`: the instances are two stages from the start, each with half of the layers
- `drop`: they become that when they are overloaded, and part again (KunServe)

All four have the same engine, blocks and bounds of a step. Figures of the requests that came in the burst or while its
queue lasted: those of the whole trace are beside them. Target: P99 TTFT of `drop` a fourth of the best other's at most,
P50 TPOT at most 1.25 of it. The trace is void if less than 60 % of the TTFT of `wait` was waiting for KV cache.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import SEED, arguments, finish, percentiles, ratio, table
from serving import Answer, Load, flat, fleet, prompt, save_model, summary, warm_up

import elastic
from elastic.engines.base import Request

PLACE = "cpu#{}=240MiB"
LAYERS = 12
ENGINE = {"max_requests": 64, "max_batch_tokens": 256, "share_prefixes": False}
PHASES = ((12.0, 0.6), (10.0, 2.4), (14.0, 0.6))
"""Seconds, and requests a second."""
QUICK = ((1.0, 2.0), (1.0, 6.0), (1.0, 2.0))
OVERLOAD = elastic.Overload(pressure_ticks=2, queue_high_s=0.1, dwell_s=3.0)


@dataclass(frozen=True)
class Arrival:
    """A request of the trace."""

    at_s: float
    in_burst: bool
    request: Request


def trace(phases: Sequence[tuple[float, float]], seed: int) -> list[Arrival]:
    """Draw arrivals, with prompts of 16 to 256 tokens and answers of 64 to 320, most of them short."""
    choose = random.Random(seed)
    found, begin = [], 0.0
    for number, (length_s, rate) in enumerate(phases):
        at_s = begin + choose.expovariate(rate)
        while at_s < begin + length_s:
            tokens = prompt(min(256, int(choose.lognormvariate(4.0, 0.6)) + 16), choose)
            new = min(320, int(choose.lognormvariate(4.9, 0.4)) + 64)
            found.append(Arrival(at_s, number == 1, Request(tokens, new, ignore_eos=True)))
            at_s += choose.expovariate(rate)
        begin += length_s
    return found


@contextmanager
def system(name: str, path: Path) -> Iterator[elastic.Fleet]:
    """Serve with two ranks in one of the ways."""
    policy: Any = {"migrate": "balance", "drop": OVERLOAD}.get(name)
    with fleet(path, [(0,), (1,)], place=PLACE, engine=ENGINE, policy=policy) as engine:
        warm_up(engine)
        if name == "pipeline":
            first, second = (instance.name for instance in engine.status().instances)
            engine.drop(layers={first: range(LAYERS // 2, LAYERS), second: range(LAYERS // 2)})
            warm_up(engine)
        yield engine


def play(engine: elastic.Fleet, arrivals: Sequence[Arrival]) -> Load:
    """Have the requests come when they are due; return when all have ended."""
    load, begin = Load(engine), time.perf_counter()
    for arrival in arrivals:
        time.sleep(max(0.0, begin + arrival.at_s - time.perf_counter()))
        load.submit(arrival.request)
    load.wait()
    return load


@dataclass
class Figures:
    """One system's, a value for each round; seconds."""

    ttft: list[list[float]]
    tpot: list[list[float]]
    burst_ttft: list[list[float]]
    tokens_per_s: list[float]
    queue_share: list[float]
    """Of all TTFT, what passed before the first step: a request is given to an instance when that has KV for it."""

    def add(self, load: Load, arrivals: Sequence[Arrival]) -> None:
        pairs: list[tuple[Arrival, Answer]] = [(a, load.answers[a.request.id]) for a in arrivals]
        self.ttft.append([answer.ttft_s for _, answer in pairs])
        self.burst_ttft.append([answer.ttft_s for arrival, answer in pairs if arrival.in_burst])
        self.tpot.append([statistics.mean(answer.gaps_s) for _, answer in pairs])
        self.tokens_per_s.append(load.tokens_per_s())
        waited = sum(answer.queued_s for _, answer in pairs)
        self.queue_share.append(waited / sum(answer.ttft_s for _, answer in pairs))

    def told(self) -> dict[str, Any]:
        ttft = {f"p{int(p * 1000) / 10:g}_ttft_s": summary(percentiles(self.ttft, p)) for p in (0.5, 0.95, 0.99)}
        return {
            **ttft,
            "p99_ttft_of_burst_s": summary(percentiles(self.burst_ttft, 0.99)),
            "p50_tpot_s": summary(percentiles(self.tpot, 0.5)),
            "p99_tpot_s": summary(percentiles(self.tpot, 0.99)),
            "tokens_per_s": summary(self.tokens_per_s),
            "share_of_ttft_for_kv": summary(self.queue_share),
        }

    def violations(self, limit_s: float) -> float:
        """Return the share of requests whose first token took longer."""
        all_ = [ttft for run in self.ttft for ttft in run]
        return sum(ttft > limit_s for ttft in all_) / len(all_)


def compared(figures: dict[str, Figures]) -> dict[str, Any]:
    """Hold `drop` against the best of the others: by median over the rounds."""
    others = {name: one for name, one in figures.items() if name != "drop"}
    if "drop" not in figures or not others:
        return {}
    p99 = {name: percentiles(one.ttft, 0.99) for name, one in figures.items()}
    p50 = {name: percentiles(one.tpot, 0.5) for name, one in figures.items()}
    best = min(others, key=lambda name: statistics.median(p99[name]))
    fastest = min(others, key=lambda name: statistics.median(p50[name]))
    limit = 5 * min(statistics.median(percentiles(one.ttft, 0.5)) for one in others.values())
    return {
        "best_other": best,
        "p99_ttft_over_drop": ratio(p99[best], p99["drop"]),
        "p50_tpot_over_best": ratio(p50["drop"], p50[fastest]),
        "slo_s": limit,
        "slo_violations": {name: one.violations(limit) for name, one in figures.items()},
    }


SYSTEMS = ("wait", "migrate", "pipeline", "drop")


def main() -> None:
    more = {"systems": {"nargs": "*", "choices": SYSTEMS, "default": list(SYSTEMS), "help": "systems to try"}}
    options = arguments(__doc__.splitlines()[0], **more)
    if options.device != "cpu":
        sys.exit("this benchmark pins ranks to cores: it is for a CPU")
    rounds = 1 if options.quick else min(options.rounds, 5)
    figures = {name: Figures([], [], [], [], []) for name in options.systems}
    events: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = save_model(Path(folder))
        for round_ in range(rounds):
            arrivals = trace(QUICK if options.quick else PHASES, SEED + round_)
            for name in random.sample(options.systems, len(options.systems)):
                with system(name, path) as engine:
                    figures[name].add(play(engine, arrivals), arrivals)
                    for event in engine.events():
                        events[f"{name}: {event.kind}"] = events.get(f"{name}: {event.kind}", 0) + 1
                print(f"round {round_}, {name}: P99 {percentiles(figures[name].ttft[-1:], 0.99)[0]:.2f} s", flush=True)
    results = {**{name: one.told() for name, one in figures.items()}, **compared(figures), "events": events}
    table(["", ""], list(flat(results)))
    finish("overload", "cpu", results)


if __name__ == "__main__":
    main()
