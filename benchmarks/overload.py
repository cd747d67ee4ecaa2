"""A burst that needs more KV cache than two instances have: what requests wait for, by what is done about it.

    python benchmarks/overload.py [--only burst low] [--trace FILE] [--systems NAME …] [--rounds 5] [--keep FILE]

Two ranks, pinned to a core each, serve the Llama of 40M parameters of `serving.py`: 156 MiB of layers in 246 MiB, a
share of .63. Each round plays one trace to all systems, in random order, with fresh processes:

- `wait`: a request waits until one of the instances has room for all that it may need
- `recompute`, `swap`: it begins sooner, and may be evicted; see `evicting.py` (vLLM, InferCept)
- `migrate`: as `wait`, and requests move to the instance that has more room (Llumnix)
- `pipeline`: the instances are two stages from the start, each with about half of the layers
- `drop`: they become that when they are overloaded, and part again (KunServe), by numbers that act sooner than the
  defaults. Only if they are named, `drop-default`, by the defaults; `drop-uncoordinated` and `drop-lookahead`: without
  coordinated copies, and with steps of equal cost besides

All have the same engine. Before the rounds each but `drop` is tuned (`tuning.py`): its own knobs, tokens of a step and
of a block are searched for the shortest P99 of TTFT on `--calibrations` traces that no round plays; `drop` has what was
fixed before, from which each search begins, so that no baseline is worse off on these. What was chosen is told. The
conditions were fixed before `drop` was measured, and rates are set by `wait` alone, as fixed, so that they hold on any
machine. Before the rounds `wait` serves a fixed number of requests at a time, each followed by another: as many as need
.575 of the KV cache of both instances, which gives the calm rate and how long a request lasts, and twice as many as the
cache has room for, which gives the most that it serves. The need of a request is its prompt and the most that it may
generate. A trace begins with as many requests as live in the calm, with a rest of their answers, which no figure
counts; then come a calm, a burst of twice as many requests as the cache has room for at twice the most that `wait`
serves, and another calm: Poisson processes, but with as many requests as they bring on average. Told with the results,
of `wait`: need over capacity in the first calm, and at the most, and the share of TTFT that was waiting for KV; the
trace is void if it is below .6, or if the need at the most is below 1. Compute is saturated, and the trace void, if
`wait` with memory to spare serves less than comes.

`--trace FILE` adds the row `trace`: a stretch of a recorded trace (Azure, BurstGPT, ...) with bursts where it has them,
scaled so that its mean need is .575 of the KV cache (`bursts.py`); another stretch of it is for tuning. A trace whose
answers are too short to hold memory, such as Azure's code, is refused.

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bursts import BEFORE, CALM, Arrival, Rates, RecordedTrace, drawn, need
from common import KEEP, SEED, Kept, arguments, finish, percentiles, ratio, table
from evicting import WAYS, Installed, given_by_present_need
from serving import Answer, Load, flat, fleet, save_model, summary, warm_up
from tuning import FIXED, KNOBS, Setting, shown, tuned

import elastic
from elastic.cluster.fleet.planning import balance

PLACE, ROOMY = "cpu#{}=246MiB", "cpu#{}=1GiB"
LAYERS, BLOCK_TOKENS = 12, 32
ENGINE = {"block_tokens": BLOCK_TOKENS, "max_requests": 64, "max_batch_tokens": 256, "share_prefixes": False}
OVERLOAD = elastic.Overload(pressure_ticks=2, queue_high_s=0.1, dwell_s=3.0)
FULL, ROOM = 2.0, 4.0
"""Need over capacity while rates are measured; the last with memory to spare."""
WINDOWS = 6
TUNING = 1000
"""Of seeds: those of rounds are below."""
ROWS = ("burst", "low", "trace")
SYSTEMS = ("wait", *WAYS, "migrate", "pipeline", "drop")
ABLATION = {
    "drop-default": elastic.Overload(),
    "drop-uncoordinated": replace(OVERLOAD, coordinated=False),
    "drop-lookahead": replace(OVERLOAD, lookahead=True),
}


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
def system(name: str, path: Path, place: str = PLACE, setting: Setting = FIXED) -> Iterator[elastic.Fleet]:
    """Serve with two ranks in one of the ways."""
    policy: Any = {"migrate": "balance", "drop": OVERLOAD, **ABLATION}.get(name)
    budget = {"step_budget": Installed(name, setting.spare)} if name in WAYS else {}
    options = {**ENGINE, **setting.engine, **budget}
    with ExitStack() as stack:
        if name in WAYS:
            stack.enter_context(given_by_present_need())
        stack.enter_context(patch.object(balance, "WORTH", setting.worth))
        engine = stack.enter_context(fleet(path, [(0,), (1,)], place=place, engine=options, policy=policy))
        warm_up(engine)
        if name == "pipeline":
            first, second = (instance.name for instance in engine.status().instances)
            engine.drop(layers={first: range(setting.cut, LAYERS), second: range(setting.cut)})
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
    """What requests that had not ended needed, of the capacity: on average in the first calm, or in all of a recorded
    trace, and at the most."""
    stalls: int
    """Times that a live sequence was left out of a step for want of blocks, or evicted."""
    events: dict[str, int]

    @classmethod
    def of(cls, engine: elastic.Fleet, load: Load, arrivals: Sequence[Arrival], rates: Rates, calm_s: float) -> Played:
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
            needs=needs(every, rates, calm_s),
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


def needs(pairs: Sequence[tuple[Arrival, Answer]], rates: Rates, calm_s: float) -> tuple[float, float]:
    """Return what requests in the system needed, of the capacity: on average in so many seconds, and at the most."""
    begin = min(answer.sent_s - arrival.at_s for arrival, answer in pairs)

    def at(moment: float) -> float:
        live = (a.request for a, answer in pairs if a.at_s <= moment < answer.at_s[-1] - begin)
        return sum(map(need, live)) / rates.capacity

    calm = statistics.mean(at(calm_s * i / 50) for i in range(50))
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
        "fewer_than_best_other": {
            over: min(violations[over][name] for name in others) - violations[over]["drop"] for over in violations
        },
    }


def conditions(wait: Figures, rates: Rates, arrivals: Sequence[Sequence[Arrival]]) -> dict[str, Any]:
    """Tell whether the traces were such as they should be, by what became of `wait`."""
    calm, most = (statistics.median(values) for values in zip(*(p.needs for p in wait.rounds), strict=True))
    offered = statistics.median(sum(map(rates.work, each)) / each[-1].at_s for each in arrivals)
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
    recorded: RecordedTrace | None = None

    def trace(self, seed: int) -> list[Arrival]:
        """Return the arrivals of a round, or of a trace for tuning."""
        share = 0.3 if self.quick else 1.0
        if self.recorded is not None:
            return self.recorded.trace(self.rates, SEED + seed, tuning=seed >= TUNING, share=share)
        return self.rates.trace(SEED + seed, burst=self.name != "low", share=share)

    def tuned(self, systems: Sequence[str], calibrations: int) -> dict[str, Setting]:
        """Find the best setting of each baseline, on so many traces; 0: all have what is fixed."""
        found = {}
        for name in systems if calibrations else ():
            if name in KNOBS:
                knobs = {knob: values[:1] for knob, values in KNOBS[name].items()} if self.quick else KNOBS[name]
                found[name], tried = tuned(knobs, lambda setting, name=name: self._p99_s(name, setting, calibrations))
                table([f"{self.name}, {name}: tried", "P99 TTFT, s"], [(k, f"{v:.2f}") for k, v in tried.items()])
                print(f"{self.name}, {name} serves with {found[name]}", flush=True)
        return found

    def _p99_s(self, name: str, setting: Setting, calibrations: int) -> float:
        played = [self.play(name, TUNING + number, setting) for number in range(calibrations)]
        return statistics.median(percentiles([each.ttft for each in played], 0.99))

    def play(self, name: str, round_: int, setting: Setting = FIXED) -> Played:
        """Play the trace of a round to a system."""
        what = f"{self.name}, {round_}, {name}" + (f", {shown(setting)}" if setting != FIXED else "")
        found = self.kept.take(what, lambda: self._played(name, round_, setting))
        played = Played(**{**found, "needs": tuple(found["needs"])})
        p99 = percentiles([played.ttft], 0.99)[0]
        print(f"{what}: P99 {p99:.2f} s", flush=True)
        return played

    def _played(self, name: str, round_: int, setting: Setting) -> dict[str, Any]:
        arrivals = self.trace(round_)
        calm_s = BEFORE * self.rates.lasts_s if self.recorded is None else arrivals[-1].at_s
        with system(name, self.path, setting=setting) as engine:
            return asdict(Played.of(engine, play(engine, arrivals), arrivals, self.rates, calm_s))

    def told(self, systems: Sequence[str], rounds: int, settings: Mapping[str, Setting]) -> dict[str, Any]:
        """Play all rounds; return what came of them."""
        played: dict[str, list[Played]] = {name: [] for name in systems}
        for round_ in range(rounds):
            for name in random.sample(systems, len(systems)):
                played[name].append(self.play(name, round_, settings.get(name, FIXED)))
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
        chosen = {name: asdict(setting) for name, setting in settings.items()}
        figures_ = {**told, **compared(figures), "events": dict(events)}
        file = {} if self.recorded is None else {"file": self.recorded.path.name}
        return {**figures_, **file, "requests": sum(map(len, traces)), "tuned": chosen}


def rates_kept(path: Path, quick: bool, kept: Kept) -> Rates:
    """Measure what `wait` serves, if that is not known yet."""
    return Rates(**kept.take("rates", lambda: vars(measured(path, quick))))


def main() -> None:
    more = {
        "systems": {"nargs": "*", "choices": (*SYSTEMS, *ABLATION), "default": list(SYSTEMS), "help": "systems to try"},
        "only": {"nargs": "*", "choices": ROWS, "default": list(ROWS), "help": "rows to take"},
        "trace": {"type": Path, "help": "a file of recorded arrivals and lengths, for the row of that name"},
        "calibrations": {"type": int, "default": 1, "help": "traces to tune baselines on; 0: they are not tuned"},
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
        for name in options.only if options.trace else [name for name in options.only if name != "trace"]:
            recorded = RecordedTrace(options.trace) if name == "trace" else None
            row = Row(name, path, rates, kept, options.quick, recorded)
            systems = ["wait", "drop"] if name == "low" else options.systems
            results[name] = row.told(systems, rounds, row.tuned(systems, options.calibrations))
            table([name, ""], list(flat(results[name])))
    finish("overload", "cpu", results)


if __name__ == "__main__":
    main()
