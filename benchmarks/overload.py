"""A burst that needs more KV cache than two instances have: what requests wait for, by what is done about it.

    python benchmarks/overload.py [--only burst low] [--systems NAME …] [--rounds 5] [--keep FILE]

Two ranks, pinned to a core each, serve the Llama of 40M parameters of `serving.py`: 156 MiB of layers in 246 MiB, a
share of .63. Each round plays one trace to all systems, in random order, with fresh processes:

- `wait`: a request waits until one of the instances has room for all that it may need
- `recompute`, `swap`: it begins sooner, and may be evicted; see `evicting.py` (vLLM, InferCept)
- `migrate`: as `wait`, and requests move to the instance that has more room (Llumnix)
- `pipeline`: the instances are two stages from the start, each with half of the layers
- `drop`: they become that when they are overloaded, and part again (KunServe). Only if they are named,
  `drop-uncoordinated` and `drop-lookahead`: without coordinated copies, and with steps of equal cost besides

All have the same engine, blocks and bounds of a step. The conditions were fixed before `drop` was measured, and rates
are set by `wait` alone, so that they hold on any machine. Before the rounds `wait` serves a fixed number of requests
at a time, each followed by another: as many as need .575 of the KV cache of both instances, which gives the calm rate
and how long a request lasts, and twice as many as the cache has room for, which gives the most that it serves. The
need of a request is its prompt and the most that it may generate. A trace begins with as many requests as live in the
calm, with a rest of their answers, which no figure counts; then come a calm, a burst of twice as many requests as the
cache has room for at twice the most that `wait` serves, and another calm: Poisson processes, but with as many requests
as they bring on average. Told with the results, of `wait`: need over capacity in the first calm, and at the most, and
the share of TTFT that was waiting for KV; the trace is void if it is below .6, or if the need at the most is below 1.
Compute is saturated, and the trace void, if `wait` with memory to spare serves less than comes.

Targets: P99 TTFT of `drop` a fourth of the best other's at most, P50 TPOT at most 1.25 of it, violations of five times
the best P50 TTFT .07 fewer. `low` is the calm without a burst, `drop` against `wait`: P99 TTFT at most 1.02, nothing
dropped. Greedy answers are compared with those of `wait`: batches of other sizes round otherwise, so a few of a random
model's may differ.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from common import KEEP, SEED, Kept, arguments, finish, percentiles, ratio, table
from evicting import WAYS, Installed, given_by_present_need
from serving import Answer, Load, flat, fleet, prompt, save_model, summary, warm_up

import elastic
from elastic.engines.base import Request

PLACE, ROOMY = "cpu#{}=246MiB", "cpu#{}=1GiB"
LAYERS, BLOCK_TOKENS = 12, 32
ENGINE = {"block_tokens": BLOCK_TOKENS, "max_requests": 64, "max_batch_tokens": 256, "share_prefixes": False}
OVERLOAD = elastic.Overload(pressure_ticks=2, queue_high_s=0.1, dwell_s=3.0)
CALM, FULL, ROOM = 0.575, 2.0, 4.0
"""Need over capacity while rates are measured; the last with memory to spare."""
BURST, BURST_RATE = 2.0, 2.0
"""Requests of a burst, of those that there is room for; and how many come a second, of the most that `wait` serves."""
BEFORE, AFTER, LOW = 0.4, 0.6, 2.0
"""The calms before and after a burst, and one without, in times that a request lasts."""
WINDOWS = 6
ROWS = ("burst", "low")
SYSTEMS = ("wait", *WAYS, "migrate", "pipeline", "drop")
ABLATION = {
    "drop-uncoordinated": replace(OVERLOAD, coordinated=False),
    "drop-lookahead": replace(OVERLOAD, lookahead=True),
}


@dataclass(frozen=True)
class Arrival:
    """A request of the trace."""

    at_s: float
    part: str
    request: Request


def drawn(choose: random.Random) -> Request:
    """Draw a prompt of 24 to 384 tokens and an answer of 16 to 176, most of them short."""
    tokens = prompt(min(384, int(choose.lognormvariate(4.5, 0.6)) + 24), choose)
    return Request(tokens, min(176, int(choose.lognormvariate(4.3, 0.4)) + 16), ignore_eos=True)


def need(request: Request) -> int:
    return len(request.prompt) + request.max_tokens


@dataclass(frozen=True)
class Rates:
    """What `wait` serves on this machine."""

    capacity: int
    """Tokens of KV cache at both instances."""
    fit: float
    """Requests that they have room for."""
    calm: float
    """Requests a second while they need `CALM` of the capacity."""
    most: float
    compute: float
    """The same without want of memory."""
    lasts_s: float
    """A request, in the calm."""
    ttft_s: float
    """P50, in the calm."""

    def trace(self, seed: int, *, burst: bool = True, share: float = 1.0) -> list[Arrival]:
        """Draw arrivals, of a share of the times; `begun` are there from the start, with a rest of their answers."""
        choose = random.Random(seed)
        found, begin = [], 0.0
        for _ in range(round(CALM * self.fit)):
            request = drawn(choose)
            left = replace(request, max_tokens=1 + int(choose.random() * request.max_tokens))
            found.append(Arrival(0.0, "begun", left))
        burst_s = BURST * self.fit / (BURST_RATE * self.most)
        around = {"calm": BEFORE * self.lasts_s, "burst": burst_s, "after": AFTER * self.lasts_s}
        lengths = around if burst else {"calm": LOW * self.lasts_s}
        for part, whole_s in lengths.items():
            length_s = share * whole_s
            found += drawn_in(choose, part, begin, length_s, self.calm if part != "burst" else BURST_RATE * self.most)
            begin += length_s
        return found


def drawn_in(choose: random.Random, part: str, begin_s: float, length_s: float, rate: float) -> list[Arrival]:
    """Draw a Poisson process that brings as many requests as it does on average."""
    times = sorted(begin_s + choose.random() * length_s for _ in range(round(rate * length_s)))
    return [Arrival(at_s, part, drawn(choose)) for at_s in times]


def measured(path: Path, quick: bool) -> Rates:
    """Measure what `wait` serves."""
    choose = random.Random(SEED)
    sizes = [(need(request), request.max_tokens) for request in (drawn(choose) for _ in range(500))]
    mean, answer = (statistics.mean(values) for values in zip(*sizes, strict=True))
    with system("wait", path) as engine:
        capacity = BLOCK_TOKENS * sum(instance.load.total_blocks for instance in engine.status().instances)
        fit = capacity / mean
        count = 2 if quick else round(fit)
        live = round(CALM * fit)
        calm_tokens_per_s, ttft_s = closed_loop(engine, live, count)
        most_tokens_per_s, _ = closed_loop(engine, round(FULL * fit), count)
    with system("wait", path, ROOMY) as engine:
        tokens_per_s, _ = closed_loop(engine, round(ROOM * fit), count)
    calm = calm_tokens_per_s / answer
    return Rates(capacity, fit, calm, most_tokens_per_s / answer, tokens_per_s / answer, live / calm, ttft_s)


def closed_loop(engine: elastic.Fleet, live: int, count: int) -> tuple[float, float]:
    """Serve requests, `live` at a time, until `count` have ended after the first; return the tokens that were generated
    a second meanwhile, and the P50 of TTFT. Those that still live are cancelled."""
    choose, load = random.Random(SEED), Load(engine)
    ended = 0
    while ended <= count:
        for _ in range(live - len(load.answers) + ended):
            load.submit(drawn(choose))
        time.sleep(0.005)
        ended = sum(answer.finish == "length" for answer in load.answers.values())
    end = time.perf_counter()
    for request in load.answers:
        engine.cancel(request)
    load.wait()
    begin = min(answer.at_s[-1] for answer in load.answers.values() if answer.finish == "length")
    tokens = sum(begin < at_s <= end for answer in load.answers.values() for at_s in answer.at_s)
    return tokens / (end - begin), statistics.median(a.ttft_s for a in load.answers.values() if a.at_s)


@contextmanager
def system(name: str, path: Path, place: str = PLACE) -> Iterator[elastic.Fleet]:
    """Serve with two ranks in one of the ways."""
    policy: Any = {"migrate": "balance", "drop": OVERLOAD, **ABLATION}.get(name)
    options = {**ENGINE, **({"step_budget": Installed(name)} if name in WAYS else {})}
    with ExitStack() as stack:
        if name in WAYS:
            stack.enter_context(given_by_present_need())
        engine = stack.enter_context(fleet(path, [(0,), (1,)], place=place, engine=options, policy=policy))
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


@dataclass(frozen=True)
class Played:
    """What came of a trace; seconds."""

    ttft: list[float]
    tpot: list[float]
    burst_ttft: list[float]
    tokens_per_s: float
    queue_share: float
    """Of all TTFT, what passed before the first step: a request is given to an instance when that has KV for it."""
    windows: list[float]
    """Mean TTFT by when requests came, in parts of the trace that are equally long."""
    answers: list[list[int]]
    needs: tuple[float, float]
    """What requests that had not ended needed, of the capacity: on average in the first calm, and at the most."""
    stalls: int
    """Times that a live sequence was left out of a step for want of blocks, or evicted."""
    events: dict[str, int]

    @classmethod
    def of(cls, engine: elastic.Fleet, load: Load, arrivals: Sequence[Arrival], rates: Rates) -> Played:
        every: list[tuple[Arrival, Answer]] = [(a, load.answers[a.request.id]) for a in arrivals]
        pairs = [(arrival, answer) for arrival, answer in every if arrival.part != "begun"]
        waited = sum(answer.queued_s for _, answer in pairs)
        return cls(
            ttft=[answer.ttft_s for _, answer in pairs],
            tpot=[statistics.mean(answer.gaps_s) for _, answer in pairs],
            burst_ttft=[answer.ttft_s for arrival, answer in pairs if arrival.part == "burst"],
            tokens_per_s=load.tokens_per_s(),
            queue_share=waited / sum(answer.ttft_s for _, answer in pairs),
            windows=by_window(pairs),
            answers=[answer.tokens for _, answer in every],
            needs=needs(every, rates),
            stalls=sum(engine.look(rank.name).stats.stalls for rank in engine.status().ranks),
            events=dict(Counter(event.kind for event in engine.events())),
        )


class Figures:
    """One system's, of all rounds."""

    def __init__(self, rounds: Sequence[Played]) -> None:
        self.rounds = rounds
        self.ttft = [played.ttft for played in rounds]
        self.tpot = [played.tpot for played in rounds]

    def told(self) -> dict[str, Any]:
        ttft = {f"p{1e3 * p / 10:g}_ttft_s": summary(percentiles(self.ttft, p)) for p in (0.5, 0.95, 0.99, 0.999)}
        burst = [played.burst_ttft for played in self.rounds]
        windows = zip(*(played.windows for played in self.rounds), strict=True)
        return {
            **ttft,
            **({"p99_ttft_of_burst_s": summary(percentiles(burst, 0.99))} if burst[0] else {}),
            "p50_tpot_s": summary(percentiles(self.tpot, 0.5)),
            "p99_tpot_s": summary(percentiles(self.tpot, 0.99)),
            "tokens_per_s": summary([played.tokens_per_s for played in self.rounds]),
            "share_of_ttft_for_kv": summary([played.queue_share for played in self.rounds]),
            "mean_ttft_by_window_s": [statistics.median(window) for window in windows],
            "stalls": sum(played.stalls for played in self.rounds),
        }

    def violations(self, limit_s: float) -> float:
        """Return the share of requests whose first token took longer."""
        all_ = [ttft for run in self.ttft for ttft in run]
        return sum(ttft > limit_s for ttft in all_) / len(all_)

    def unlike(self, other: Figures) -> int:
        """Count the answers that are not those of another system."""
        pairs = zip(self.rounds, other.rounds, strict=True)
        return sum(a != b for one, two in pairs for a, b in zip(one.answers, two.answers, strict=True))


def by_window(pairs: Sequence[tuple[Arrival, Answer]]) -> list[float]:
    """Return the mean TTFT of each part of the trace; 0 where no request came."""
    width = max(arrival.at_s for arrival, _ in pairs) / WINDOWS
    parts: list[list[float]] = [[] for _ in range(WINDOWS)]
    for arrival, answer in pairs:
        parts[min(WINDOWS - 1, int(arrival.at_s / width))].append(answer.ttft_s)
    return [statistics.mean(part) if part else 0.0 for part in parts]


def needs(pairs: Sequence[tuple[Arrival, Answer]], rates: Rates) -> tuple[float, float]:
    """Return what requests in the system needed, of the capacity: on average in the first calm, and at the most."""
    begin = min(answer.sent_s - arrival.at_s for arrival, answer in pairs)

    def at(moment: float) -> float:
        live = (a.request for a, answer in pairs if a.at_s <= moment < answer.at_s[-1] - begin)
        return sum(map(need, live)) / rates.capacity

    calm = statistics.mean(at(BEFORE * rates.lasts_s * i / 50) for i in range(50))
    return calm, max(at(arrival.at_s) for arrival, _ in pairs)


def compared(figures: dict[str, Figures]) -> dict[str, Any]:
    """Hold `drop` against the best of the others: by median over the rounds."""
    others = {name: one for name, one in figures.items() if name != "drop" and name not in ABLATION}
    if "drop" not in figures or not others:
        return {}
    p99 = {name: percentiles(one.ttft, 0.99) for name, one in figures.items()}
    p50 = {name: percentiles(one.tpot, 0.5) for name, one in figures.items()}
    best = min(others, key=lambda name: statistics.median(p99[name]))
    fastest = min(others, key=lambda name: statistics.median(p50[name]))
    p50_ttft = min(statistics.median(percentiles(one.ttft, 0.5)) for one in others.values())
    violations = {
        f"over_{times}_times_best_p50": {name: one.violations(times * p50_ttft) for name, one in figures.items()}
        for times in (5, 10)
    }
    return {
        "best_other": best,
        "p99_ttft_over_drop": ratio(p99[best], p99["drop"]),
        "p50_tpot_over_best": ratio(p50["drop"], p50[fastest]),
        "p50_tpot_over": {name: ratio(p50["drop"], p50[name]) for name in others},
        "slo_violations": violations,
    }


def conditions(wait: Figures, rates: Rates, arrivals: Sequence[Sequence[Arrival]]) -> dict[str, Any]:
    """Tell whether the traces were such as they should be, by what became of `wait`."""
    calm, most = (statistics.median(values) for values in zip(*(p.needs for p in wait.rounds), strict=True))
    offered = statistics.median(sum(a.part != "begun" for a in each) / each[-1].at_s for each in arrivals)
    share = statistics.median(played.queue_share for played in wait.rounds)
    return {
        "need_in_calm": calm,
        "need_at_most": most,
        "share_of_ttft_for_kv": share,
        "offered_of_compute": offered / rates.compute,
        "void": share < 0.6 or most < 1 or offered > rates.compute,
    }


@dataclass(frozen=True)
class Row:
    """The traces of a row, played to systems; what was played before is `kept`."""

    name: str
    path: Path
    rates: Rates
    kept: Kept
    quick: bool

    def trace(self, round_: int) -> list[Arrival]:
        return self.rates.trace(SEED + round_, burst=self.name != "low", share=0.3 if self.quick else 1.0)

    def play(self, name: str, round_: int) -> Played:
        """Play the trace of a round to a system."""
        found = self.kept.take(f"{self.name}, {round_}, {name}", lambda: self._played(name, round_))
        played = Played(**{**found, "needs": tuple(found["needs"])})
        p99 = percentiles([played.ttft], 0.99)[0]
        print(f"{self.name}, round {round_}, {name}: P99 {p99:.2f} s", flush=True)
        return played

    def _played(self, name: str, round_: int) -> dict[str, Any]:
        arrivals = self.trace(round_)
        with system(name, self.path) as engine:
            return asdict(Played.of(engine, play(engine, arrivals), arrivals, self.rates))

    def told(self, systems: Sequence[str], rounds: int) -> dict[str, Any]:
        """Play all rounds; return what came of them."""
        played: dict[str, list[Played]] = {name: [] for name in systems}
        for round_ in range(rounds):
            for name in random.sample(systems, len(systems)):
                played[name].append(self.play(name, round_))
        figures = {name: Figures(rounds) for name, rounds in played.items()}
        traces = [self.trace(round_) for round_ in range(rounds)]
        told: dict[str, Any] = {name: one.told() for name, one in figures.items()}
        if "wait" in figures:
            if self.name != "low":
                told["conditions"] = conditions(figures["wait"], self.rates, traces)
            for name, one in figures.items():
                told[name]["answers_unlike_wait"] = one.unlike(figures["wait"])
        events = Counter[str]()
        for name, rounds_ in played.items():
            for one in rounds_:
                events.update({f"{name}: {kind}": count for kind, count in one.events.items()})
        return {**told, **compared(figures), "events": dict(events), "requests": sum(map(len, traces))}


def rates_kept(path: Path, quick: bool, kept: Kept) -> Rates:
    """Measure what `wait` serves, if that is not known yet."""
    return Rates(**kept.take("rates", lambda: vars(measured(path, quick))))


def main() -> None:
    more = {
        "systems": {"nargs": "*", "choices": (*SYSTEMS, *ABLATION), "default": list(SYSTEMS), "help": "systems to try"},
        "only": {"nargs": "*", "choices": ROWS, "default": list(ROWS), "help": "rows to take"},
        "keep": KEEP,
    }
    options = arguments(__doc__.splitlines()[0], **more)
    if options.device != "cpu":
        sys.exit("this benchmark pins ranks to cores: it is for a CPU")
    rounds = 1 if options.quick else min(options.rounds, 5)
    results: dict[str, Any] = {}
    kept = Kept(options.keep)
    with tempfile.TemporaryDirectory() as folder:
        path = save_model(Path(folder))
        rates = rates_kept(path, options.quick, kept)
        results["rates"] = vars(rates)
        table(["rates", ""], list(flat(results["rates"])))
        for name in options.only:
            row = Row(name, path, rates, kept, options.quick)
            systems = ["wait", "drop"] if name == "low" else options.systems
            results[name] = row.told(systems, rounds)
            table([name, ""], list(flat(results[name])))
    finish("overload", "cpu", results)


if __name__ == "__main__":
    main()
