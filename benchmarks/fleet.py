"""A fleet of processes: what two ranks bring, what a move and a crash cost, and what the fleet itself costs.

    python benchmarks/fleet.py [--only NAME …] [--rounds 5]

Each round starts fresh processes; works of one row are shuffled within a round. Ranks are pinned to a core each (but
in `overhead` and `first_token`) and compute with one thread; the process of the fleet is not pinned. The model is a
Llama of 40M parameters with random weights (12 layers, d = 512, 8 heads of 64): a step of one sequence takes it about
20 ms on one core. Targets, fixed before the figures were taken:

- `two_ranks`: tokens/s of two ranks over one, mixed traffic: at least 1.5
- `move`: a request of 1,000 tokens: its own gap at most 3 steps; others' P99 gap at most 1.1 of that at rest
- `kill`, by SIGKILL and by SIGSTOP: first token again within 3 s, nothing lost, nothing wrong, no token computed again
- `start`: a rank serves within 1 s (the model inside)
- `overhead`: one rank against the engine in process: at most 3 % of tokens/s
- `first_token`: the same of one request alone: at most 2 ms of TTFT
- `routing`: shared prefixes, two ranks: P95 TTFT better than round robin's and least load's, tokens/s no worse
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import SEED, arguments, finish, percentiles, ratio, table
from serving import PLACE, SIGNALS, Load, flat, fleet, in_process, prompt, save_model, served, summary, warm_up
from transformers import AutoModelForCausalLM

import elastic
from elastic.assets import MODEL_DIR
from elastic.engines.base import Engine, Request

ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def mixed(count: int, new: int) -> list[Request]:
    """Prompts of 16 to 512 tokens, few of them long."""
    choose = random.Random(SEED)
    lengths = [min(512, 16 + int(choose.expovariate(1 / 96))) for _ in range(count)]
    return [Request(prompt(length, choose), new, ignore_eos=True) for length in lengths]


def two_ranks(path: Path, rounds: int, quick: bool) -> dict[str, Any]:
    requests = 8 if quick else 48
    works: dict[str, Callable[[], Any]] = {
        "one rank, one core": lambda: fleet(path, [(0,)]),
        "one rank, two threads": lambda: fleet(path, [(0, 1)]),
        "two ranks, a core each": lambda: fleet(path, [(0,), (1,)]),
    }
    speeds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name in random.sample(list(works), len(works)):
            with works[name]() as engine:
                speeds[name].append(served(engine, mixed(requests, 64)).tokens_per_s())
    one, threads, two = speeds.values()
    return {
        "tokens_per_s": {name: statistics.median(values) for name, values in speeds.items()},
        "over_one_core": ratio(two, one),
        "over_two_threads": ratio(two, threads),
    }


def move(path: Path, rounds: int, quick: bool) -> dict[str, Any]:
    """Move a request of 1,000 tokens while eight others run beside it; the same run without a move is its rest.

    By round robin four of the others are at each rank, so that in both runs four of them share their steps with it. The
    prompts of each run are new: none is in a prefix cache.
    """
    length, new = (200, 40) if quick else (1000, 120)
    others_new, choose = new + 40, random.Random(SEED)
    gaps: dict[str, list[float]] = {"own steps": [], "moved P99": [], "rest P99": [], "rate": [], "copy rate": []}
    for _ in range(rounds):
        with fleet(path, [(0,), (1,)], routing="round_robin") as engine:
            warm_up(engine)
            for moving in random.sample([True, False], 2):
                load = Load(engine)
                long = Request(prompt(length, choose), new, ignore_eos=True)
                answer = load.submit(long)
                others = [Request(prompt(64, choose), others_new, ignore_eos=True) for _ in range(8)]
                for request in others:
                    load.submit(request)
                while len(answer.tokens) < new // 3:
                    time.sleep(0.005)
                if moving:
                    source = engine.instance_of(long.id)
                    target = next(i.name for i in engine.status().instances if i.name != source)
                    begin = time.perf_counter()
                    moved = engine.move(long.id, target)
                    took = time.perf_counter() - begin
                load.wait()
                of_others = [gap for request in others for gap in load.answers[request.id].gaps_s]
                p99 = percentiles([of_others], 0.99)[0]
                if moving:
                    usual = statistics.median(answer.gaps_s)
                    around = [g for t, g in zip(answer.at_s[1:], answer.gaps_s, strict=True) if t >= begin]
                    gaps["own steps"].append(max(around) / usual)
                    gaps["moved P99"].append(p99)
                    gaps["rate"].append(moved.moved_bytes / took)
                    gaps["copy rate"].append(copy_rate(moved.moved_bytes))
                else:
                    gaps["rest P99"].append(p99)
    return {
        "own_gap_in_steps": summary(gaps["own steps"]),
        "others_p99_itl": ratio(gaps["moved P99"], gaps["rest P99"]),
        "bytes_per_s": statistics.median(gaps["rate"]),
        "over_plain_copy": ratio(gaps["rate"], gaps["copy rate"]),
    }


def copy_rate(nbytes: int) -> float:
    """Return the bytes a second of a plain copy of as many bytes."""
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    begin = time.perf_counter()
    target.copy_(source)
    return nbytes / (time.perf_counter() - begin)


def kill(path: Path, rounds: int, quick: bool) -> dict[str, Any]:
    """Lose one of two ranks under load; every answer is held against the model's own."""
    count, new = (4, 40) if quick else (16, 96)
    choose = random.Random(SEED)
    asked = [Request(prompt(96, choose), new, ignore_eos=True) for _ in range(count)]
    with in_process(path) as engine:
        right = [answer.tokens for answer in served(engine, asked).answers.values()]
    figures: dict[str, Any] = {}
    for how, number in SIGNALS.items():
        again, wrong, recomputed, lost = [], 0, 0, 0
        for _ in range(rounds):
            with fleet(path, [(0,), (1,)]) as engine:
                warm_up(engine)
                load = Load(engine)
                answers = [load.submit(request) for request in asked]
                while min(len(answer.tokens) for answer in answers) < new // 3:
                    time.sleep(0.005)
                victim = engine.status().ranks[0]
                at_victim = [r.id for r in asked if engine.instance_of(r.id) == victim.name]
                begin = time.perf_counter()
                os.kill(victim.pid, number)
                load.wait()
                again.append(max((first_behind(load, name, begin) - begin for name in at_victim), default=0.0))
                lost += sum(answer.finish != "length" for answer in answers)
                wrong += sum(answer.tokens != tokens for answer, tokens in zip(answers, right, strict=True))
                recomputed += engine.status().totals.recomputed_tokens
        told = {"first_token_again_s": summary(again), "lost": lost, "wrong": wrong, "recomputed_tokens": recomputed}
        figures[how] = {**told, "requests": count * rounds}
    return figures


def first_behind(load: Load, request: str, begin_s: float) -> float:
    """Return when a request had its first token behind a rank's end: what was under way may come until then."""
    return next((t for t in load.answers[request].at_s if t > begin_s + 0.05), begin_s)


def start(path: Path, rounds: int, quick: bool) -> dict[str, Any]:
    """Start another rank while one serves; beside it, loading and wrapping the model in this process."""
    ranks, loads = [], []
    for _ in range(rounds):
        with fleet(MODEL_DIR, [(0,)]) as engine:
            begin = time.perf_counter()
            engine.add(places=[PLACE.format(1)])
            ranks.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
        elastic.wrap(model, places=[PLACE.format(0)])
        loads.append(time.perf_counter() - begin)
        elastic.unwrap(model)
    return {"rank_s": summary(ranks), "load_s": summary(loads)}


def overhead(path: Path, rounds: int, quick: bool) -> dict[str, Any]:
    """One rank against the engine in process: 16 and 64 requests at once.

    Both compute with one thread, which may run on any core: a rank that is pinned shares its core with the fleet.
    """
    speeds: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for name in random.sample(["fleet", "engine"], 2):
            with fleet(path, [()], environment=ONE_THREAD) if name == "fleet" else in_process(path) as engine:
                for count in (4,) if quick else (16, 64):
                    speed = served(engine, mixed(count, 48)).tokens_per_s()
                    speeds.setdefault(f"{count} requests", {"fleet": [], "engine": []})[name].append(speed)
    return {"tokens_per_s": {count: ratio(by["fleet"], by["engine"]) for count, by in speeds.items()}}


def first_token(path: Path, rounds: int, quick: bool) -> dict[str, Any]:
    """One rank and the engine in process side by side, of which one serves at a time: single requests by turns."""
    more, alone = [], []
    for round_ in range(rounds):
        with fleet(path, [()], environment=ONE_THREAD) as ranks, in_process(path) as engine:
            engines: dict[str, Engine] = {"fleet": ranks, "engine": engine}
            found: dict[str, list[float]] = {name: [] for name in engines}
            for each in engines.values():
                warm_up(each)
            for number in range(4 if quick else 60):
                for name in random.sample(list(engines), 2):
                    found[name].append(served_alone(engines[name], 1000 * round_ + number))
            alone.append(1e3 * statistics.median(found["engine"]))
            more.append(1e3 * statistics.median(found["fleet"]) - alone[-1])
    return {"engine_ms": summary(alone), "more_ms": summary(more)}


def served_alone(engine: Engine, number: int) -> float:
    load = Load(engine)
    answer = load.submit(Request(prompt(24, random.Random(number)), 2, ignore_eos=True))
    load.wait()
    return answer.ttft_s


def routing(path: Path, rounds: int, quick: bool) -> dict[str, Any]:
    """Prompts of which ten beginnings of 256 tokens are shared, by three ways to route.

    First in Poisson arrivals, 4 a second, which two ranks can serve: that gives TTFT, while tokens/s are those that
    arrive. Then four times as many at once, each time of ten other beginnings: that gives tokens/s. One such burst
    alone says little: which requests are its last, and at which rank, is chance.
    """
    ways, count, bursts = ("round_robin", "least_load", "prefix"), 8 if quick else 60, 1 if quick else 4
    figures: dict[str, dict[str, list[float]]] = {way: {} for way in ways}
    for round_ in range(rounds):
        choose = random.Random(SEED + round_)
        arriving, *at_once = (shared_beginnings(count, choose) for _ in range(1 + bursts))
        gaps = [choose.expovariate(4.0) for _ in arriving]
        for way in random.sample(ways, len(ways)):
            with fleet(path, [(0,), (1,)], routing=way) as engine:
                warm_up(engine)
                paced = loaded(engine, arriving, gaps)
                speeds = [loaded(engine, prompts, [0.0] * count).tokens_per_s() for prompts in at_once]
            found = {
                "p95_ttft_s": percentiles([[a.ttft_s for a in paced.answers.values()]], 0.95)[0],
                "tokens_per_s_arriving": paced.tokens_per_s(),
                "tokens_per_s_at_once": statistics.harmonic_mean(speeds),
            }
            for name, figure in found.items():
                figures[way].setdefault(name, []).append(figure)
    best = figures["prefix"]
    return {
        "median": {way: {name: statistics.median(all_) for name, all_ in by.items()} for way, by in figures.items()},
        "prefix_over": {way: {name: ratio(best[name], figures[way][name]) for name in best} for way in ways[:2]},
    }


def shared_beginnings(count: int, choose: random.Random) -> list[tuple[int, ...]]:
    """Return prompts of 264 to 303 tokens that begin in ten ways."""
    beginnings = [prompt(256, choose) for _ in range(10)]
    return [choose.choice(beginnings) + prompt(choose.randrange(8, 48), choose) for _ in range(count)]


def loaded(engine: Engine, prompts: Sequence[tuple[int, ...]], gaps: Sequence[float]) -> Load:
    """Ask for 24 tokens for each prompt, so many seconds behind the one before it."""
    load = Load(engine)
    for tokens, gap in zip(prompts, gaps, strict=True):
        time.sleep(gap)
        load.submit(Request(tokens, 24, ignore_eos=True))
    load.wait()
    return load


ROWS = {row.__name__: row for row in (two_ranks, move, kill, start, overhead, first_token, routing)}


def main() -> None:
    more = {"only": {"nargs": "*", "choices": list(ROWS), "default": list(ROWS), "help": "rows to take"}}
    options = arguments(__doc__.splitlines()[0], **more)
    if options.device != "cpu":
        sys.exit("this benchmark pins ranks to cores: it is for a CPU")
    rounds = 1 if options.quick else min(options.rounds, 5)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = save_model(Path(folder))
        for name in options.only:
            results[name] = ROWS[name](path, rounds, options.quick)
            table([name, ""], list(flat(results[name])))
            print(flush=True)
    finish("fleet", "cpu", results)


if __name__ == "__main__":
    main()
