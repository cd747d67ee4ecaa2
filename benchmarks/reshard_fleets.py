"""The rows `context`, `steps`, `hybrid` and `rates` of `reshard.py`: ranks that share layers under running requests."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import reshard_through_host
from common import SEED, Kept, percentiles, ratio
from reshard_setting import BLOCK_TOKENS, ROOMY_SHARE, SHARDS, SHARE, Setting
from serving import Answer, Load, fleet, prompt, summary, warm_up

import elastic
from elastic.engines.base import Request

LENGTHS = elastic.Lengths(most_ranks=2, dwell_s=1.0, patience_s=5.0)
OVERLOAD = elastic.Overload(pressure_ticks=2, queue_high_s=0.1, dwell_s=3.0)
FORMS: dict[str, dict[str, Any]] = {
    "1 layer": {"layers_per_step": 1},
    "2 layers": {"layers_per_step": 2},
    "all layers": {"layers_per_step": None},
    "stop for all": {"exchange": "stall"},
}
HOST = "through host"


@contextmanager
def ranks(setting: Setting, count: int = 2, share: float = SHARE, **options: Any) -> Iterator[elastic.Fleet]:
    """Serve with so many ranks, whose layers are cut and are such a share of their memory."""
    places, cores = [setting.place(number, share) for number in range(count)], setting.cores(count)
    options = {"engine": setting.engine, "shards": SHARDS, "beat_timeout_s": 20.0, **options}
    with fleet(setting.path, cores, places=places, **options) as engine:
        warm_up(engine)
        yield engine


def names(engine: elastic.Fleet) -> list[str]:
    return [instance.name for instance in engine.status().instances]


def reshard(engine: elastic.Fleet, tp: int, **options: Any) -> Any:
    done = engine.reshard(names(engine), tp=tp, **options)
    if done.status != "applied":
        raise RuntimeError(f"tp={tp} was {done.status}: {done.why}")
    return done


def longest_served(engine: elastic.Fleet, degree: int, positions: int) -> int:
    """Serve the longest request that the fleet says it can hold, and have a block more refused; return its tokens.

    Where the model was made for fewer tokens, a request of all of these is served.
    """
    predicted = max(blocks[degree] for blocks in engine.capacity((degree,)).values()) * BLOCK_TOKENS
    load, choose = Load(engine), random.Random(SEED)
    tokens = min(predicted, positions)
    answer = load.submit(Request(prompt(tokens - 4, choose), 4, ignore_eos=True))
    load.wait()
    if answer.finish != "length":
        raise RuntimeError(f"a request of {tokens} tokens ended as {answer.finish}")
    try:
        engine.submit(Request(prompt(predicted + BLOCK_TOKENS, choose), 4), print)
    except elastic.ElasticError:
        return predicted
    raise RuntimeError(f"a request of {predicted + BLOCK_TOKENS} tokens was taken")


def context(setting: Setting, rounds: int, quick: bool, kept: Kept) -> dict[str, Any]:
    """The longest request at each degree, of ranks with the same budgets. Degree 4: four ranks on two cores."""
    found: dict[str, Any] = {}
    for degree in (1, 2) if quick else (1, 2, 4):
        with ranks(setting, max(2, degree)) as engine:
            if degree > 1:
                reshard(engine, degree)
            left = budgets_leave(engine, degree) / setting.sizes.token_bytes
            tokens = longest_served(engine, degree, setting.sizes.positions)
        found[f"tp={degree}"] = {"longest_tokens": tokens, "of_what_budgets_leave": tokens / left}
    longest = {name: figures["longest_tokens"] for name, figures in found.items()}
    return {**found, "over_tp1": {name: tokens / longest["tp=1"] for name, tokens in longest.items()}}


def budgets_leave(engine: elastic.Fleet, degree: int) -> int:
    """Return the bytes for which budgets have room beside weights that are there, and what is fixed."""
    left = 0
    for rank in engine.status().ranks[:degree]:
        (place,) = engine.look(rank.name).status.places
        kept = sum(n for owner, n in place.owners.items() if owner.startswith(("layer:", "fixed", "staging")))
        left += place.budget_bytes - kept
    return left


def steps(setting: Setting, rounds: int, quick: bool, kept: Kept) -> dict[str, Any]:
    """Gaps between tokens while layers change their rank, so many at a pause, over those at rest; up and down."""
    forms = dict(list(FORMS.items())[::3]) if quick else FORMS
    figures: dict[str, dict[str, list[float]]] = {name: {} for name in (*forms, HOST)}

    def take(engine: elastic.Fleet, name: str) -> None:
        for key, value in transformed(engine, FORMS.get(name, reshard_through_host.FORM), setting).items():
            figures[name].setdefault(key, []).append(value)

    for _ in range(1 if quick else min(rounds, 2)):
        with ranks(setting, share=ROOMY_SHARE, routing="round_robin") as engine:
            for name in random.sample(list(forms), len(forms)):
                take(engine, name)
        through_host = setting.engine | {"step_budget": reshard_through_host.ThroughHost()}
        with ranks(setting, share=ROOMY_SHARE, routing="round_robin", engine=through_host) as engine:
            take(engine, HOST)
    stop_ms = statistics.median(figures["stop for all"]["stalled_ms"])
    both_s = {
        name: [up + down for up, down in zip(figure["up_s"], figure["down_s"], strict=True)]
        for name, figure in figures.items()
    }
    return {
        name: {
            "up_s": summary(figure["up_s"]),
            "down_s": summary(figure["down_s"]),
            "up_and_down_over_through_host": ratio(both_s[name], both_s[HOST]),
            "stalled_ms": summary(figure["stalled_ms"]),
            "hidden_of_stop": 1 - statistics.median(figure["stalled_ms"]) / stop_ms,
            "moved_of_all_kv": summary(figure["moved_of_all_kv"]),
            "longest_gap_ms": summary([1e3 * value for value in figure["longest_gap_s"]]),
            "tpot_over_rest": ratio(figure["tpot_during_s"], figure["tpot_s"]),
            "tpot_shared_over_rest": ratio(figure["tpot_shared_s"], figure["tpot_s"]),
            "cores_at_rest": summary(figure["cores_at_rest"]),
            "cores_during": summary(figure["cores_during"]),
        }
        for name, figure in figures.items()
    }


def transformed(engine: elastic.Fleet, form: dict[str, Any], setting: Setting) -> dict[str, float]:
    """Have ranks share layers and part again beside four long answers; return what these had of it."""
    load, choose, rest_s = Load(engine), random.Random(SEED), 0.3 if setting.quick else 1.0
    asked = [Request(prompt(setting.prompt_tokens, choose), 1500, ignore_eos=True) for _ in range(4)]
    answers = [load.submit(request) for request in asked]
    while min(len(answer.tokens) for answer in answers) < 4:
        time.sleep(0.005)
    used = [cpu_s(engine)]
    rest = timed(lambda: time.sleep(rest_s))
    used.append(cpu_s(engine))
    begin = time.perf_counter()
    up = reshard(engine, 2, **form)
    during = (begin, time.perf_counter())
    used.append(cpu_s(engine))
    tokens = sum(len(r.prompt) + len(a.tokens) for r, a in zip(asked, answers, strict=True))
    shared = timed(lambda: time.sleep(rest_s))
    down = reshard(engine, 1, **form)
    for request in asked:
        engine.cancel(request.id)
    load.wait()
    return {
        "up_s": up.seconds,
        "down_s": down.seconds,
        "stalled_ms": max(up.stalled_ms, down.stalled_ms),
        "moved_of_all_kv": up.moved_bytes / (tokens * setting.sizes.token_bytes),
        "longest_gap_s": max(gaps(answers, during)),
        "tpot_during_s": statistics.mean(gaps(answers, during)),
        "tpot_shared_s": statistics.mean(gaps(answers, shared)),
        "tpot_s": statistics.mean(gaps(answers, rest)),
        "cores_at_rest": (used[1] - used[0]) / (rest[1] - rest[0]),
        "cores_during": (used[2] - used[1]) / (during[1] - during[0]),
    }


def cpu_s(engine: elastic.Fleet) -> float:
    """Return the processor time that the ranks have used, in seconds."""
    ticks = 0
    for rank in engine.status().ranks:
        after_name = Path(f"/proc/{rank.pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(after_name[11]) + int(after_name[12])  # utime, stime: fields 14 and 15
    return ticks / os.sysconf("SC_CLK_TCK")


def timed(act: Any) -> tuple[float, float]:
    begin = time.perf_counter()
    act()
    return begin, time.perf_counter()


def gaps(answers: Sequence[Answer], window: tuple[float, float]) -> list[float]:
    """Return the gaps between tokens that overlap a stretch of time."""
    pairs = (pair for answer in answers for pair in zip(answer.at_s, answer.at_s[1:], strict=False))
    return [b - a for a, b in pairs if a < window[1] and b > window[0]]


# -- a hybrid trace


HALF, SHARES = 0.5, (0.25, 0.75, 1.0)
"""Of the short requests that two ranks serve by themselves when there are always enough of them."""
SYSTEMS: dict[str, dict[str, Any]] = {
    "lengths": {"policy": LENGTHS},
    "drop": {"policy": OVERLOAD},
    "pipeline": {},
    "tp1": {},
    "tp2": {},
}


@dataclass(frozen=True)
class Played:
    """What came of a trace."""

    short_ttft: list[float]
    short_tpot: list[float]
    short_gaps: list[float]
    """Between two tokens of a short request, each."""
    tokens_per_s: float
    """Prompts and answers of requests that ended in time."""
    longs: int
    seconds: float
    events: dict[str, int]


def trace(seed: int, rate: float, length_s: float, longs: int, long_tokens: int) -> list[tuple[float, str, Request]]:
    """Short prompts of 64 to 192 tokens at random times, as many as come on average, and long ones at even times."""
    choose = random.Random(seed)
    found: list[tuple[float, str, Request]] = []
    for _ in range(max(4, round(rate * length_s))):
        request = Request(prompt(choose.randint(64, 192), choose), choose.randint(16, 48), ignore_eos=True)
        found.append((choose.random() * length_s, "short", request))
    for number in range(longs):
        request = Request(prompt(long_tokens - 16, choose), 16, ignore_eos=True)
        found.append(((number + 0.3) * length_s / longs, "long", request))
    return sorted(found, key=lambda arrival: arrival[0])


@dataclass(frozen=True)
class Mix:
    """Short and long requests for ranks of these speeds and sizes."""

    short_per_s: float
    """That two ranks serve by themselves when there are always enough of them."""
    longest: dict[str, int]
    """Tokens of the longest request, by degree."""

    @property
    def long_tokens(self) -> int:
        """What fits no rank by itself."""
        return min((3 * self.longest["tp=1"]) // 2, (9 * self.longest["tp=2"]) // 10)


def mix_of(setting: Setting, quick: bool, kept: Kept) -> Mix:
    """Measure what two ranks serve, if that is not known yet."""

    def take() -> dict[str, Any]:
        with ranks(setting) as engine:
            sizes = {f"tp={d}": max(b[d] for b in engine.capacity((1, 2)).values()) * BLOCK_TOKENS for d in (1, 2)}
            return {"short_per_s": most_rate(engine, 8 if quick else 40), "longest": sizes}

    return Mix(**kept.take("mix", take))


def hybrid(setting: Setting, rounds: int, quick: bool, kept: Kept) -> dict[str, Any]:
    """Short and long requests: the long ones fit no rank by itself. TTFT of at most 3 s and TPOT of at most .2 s."""
    return at_share(HALF, setting, rounds, quick, kept)


def rates(setting: Setting, rounds: int, quick: bool, kept: Kept) -> dict[str, Any]:
    """The same at other rates of the short requests: shares of what two ranks serve by themselves."""
    return {str(share): at_share(share, setting, rounds, quick, kept) for share in SHARES[: 1 if quick else None]}


def at_share(share: float, setting: Setting, rounds: int, quick: bool, kept: Kept) -> dict[str, Any]:
    mix = mix_of(setting, quick, kept)
    rate = share * mix.short_per_s
    played: dict[str, list[Played]] = {name: [] for name in SYSTEMS}
    length_s, longs = (4.0, 1) if quick else (12.0, 2)

    def take(name: str, seed: int) -> dict[str, Any]:
        with ranks(setting, **SYSTEMS[name]) as engine:
            if name == "tp2":
                reshard(engine, 2)
            if name == "pipeline":
                (first, second), count = names(engine), setting.sizes.layers
                engine.drop(layers={first: range(count // 2, count), second: range(count // 2)})
            return asdict(play(engine, trace(seed, rate, length_s, longs, mix.long_tokens)))

    for round_ in range(1 if quick else min(rounds, 3)):
        for name in random.sample(list(SYSTEMS), len(SYSTEMS)):
            one = Played(**kept.take(f"hybrid of {share}, {round_}, {name}", partial(take, name, SEED + round_)))
            played[name].append(one)
            print(f"round {round_}, {name}: {one.tokens_per_s:.0f} tokens/s in time", flush=True)
    tokens = {name: [one.tokens_per_s for one in all_] for name, all_ in played.items()}
    return {
        "short_requests_per_s": rate,
        "long_tokens": mix.long_tokens,
        "longest_tokens": mix.longest,
        "long_ones": longs * len(played["tp1"]),
        **{name: told(all_) for name, all_ in played.items()},
        "tokens_per_s_over": {
            name: ratio(tokens["lengths"], one) for name, one in tokens.items() if name != "lengths" and min(one) > 0
        },
    }


def most_rate(engine: elastic.Fleet, count: int) -> float:
    """Return how many short requests a second two ranks serve when there are always enough of them."""
    load, begin = Load(engine), time.perf_counter()
    for _, _, request in trace(SEED, 1.0, float(count), 0, 0):
        load.submit(request)
    load.wait()
    return len(load.answers) / (time.perf_counter() - begin)


TTFT_S, TPOT_S = 3.0, 0.2


def play(engine: elastic.Fleet, arrivals: Sequence[tuple[float, str, Request]]) -> Played:
    """Have requests come when they are due; return what came of them when all have ended."""
    load, kinds, begin = Load(engine), dict[str, str](), time.perf_counter()
    for at_s, kind, request in arrivals:
        time.sleep(max(0.0, begin + at_s - time.perf_counter()))
        try:
            load.submit(request)
            kinds[request.id] = kind
        except elastic.ElasticError:  # no rank can ever hold it
            del load.answers[request.id]
    load.wait()
    seconds = time.perf_counter() - begin
    by_id = {request.id: request for _, _, request in arrivals}
    short = [answer for name, answer in load.answers.items() if kinds[name] == "short"]
    in_time_ = [name for name, answer in load.answers.items() if in_time(kinds[name], answer)]
    return Played(
        short_ttft=[answer.ttft_s for answer in short],
        short_tpot=[statistics.mean(answer.gaps_s) for answer in short if answer.gaps_s],
        short_gaps=[gap for answer in short for gap in answer.gaps_s],
        tokens_per_s=sum(len(by_id[n].prompt) + len(load.answers[n].tokens) for n in in_time_) / seconds,
        longs=sum(kinds[n] == "long" and a.finish == "length" for n, a in load.answers.items()),
        seconds=seconds,
        events=dict(Counter(event.kind for event in engine.events())),
    )


def in_time(kind: str, answer: Answer) -> bool:
    """Tell whether a request counts: a long one if it ended, a short one if it was also in time."""
    if answer.finish != "length":
        return False
    tpot_s = statistics.mean(answer.gaps_s) if answer.gaps_s else 0.0
    return kind == "long" or (answer.ttft_s <= TTFT_S and tpot_s <= TPOT_S)


def told(played: Sequence[Played]) -> dict[str, Any]:
    ttft, tpot = [one.short_ttft for one in played], [one.short_tpot for one in played]
    gaps_s = [one.short_gaps for one in played]
    events = sum((Counter(one.events) for one in played), Counter[str]())
    return {
        "tokens_per_s": summary([one.tokens_per_s for one in played]),
        "short_p50_ttft_s": summary(percentiles(ttft, 0.5)),
        "short_p99_ttft_s": summary(percentiles(ttft, 0.99)),
        "short_p50_tpot_s": summary(percentiles(tpot, 0.5)),
        "short_p99_gap_s": summary(percentiles(gaps_s, 0.99)),
        "long_ones_served": sum(one.longs for one in played),
        "seconds": summary([one.seconds for one in played]),
        "events": dict(events),
    }
