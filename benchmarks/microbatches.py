"""What stages of a pipeline wait for each other, by how a queue of prompts is cut into microbatches.

    python benchmarks/microbatches.py [--tokens 128 256 512] [--rounds 5] [--keep FILE]

Two ranks, pinned to a core each, are the stages of two instances, with a batch of each in flight, or two. The queue is
there from the start: prompts of 64 to 4,096 tokens, few of them long (1:64), for one token each. The model is one whose
attention counts (12 layers, hidden 256). Cut by tokens, as Sarathi does, with the best of three budgets, against cut
by cost (KunServe, section 4.3), whose cost model is fitted first, in this process, as ranks do it (`fit_cost`). Rounds
play the same queue to all, in random order, with fresh processes. Attention has to take .3 of the time of steps at
least, measured in this process before the rounds: else the figures are void.

A stage is idle while it does not use its core, from the first step to the last; the bubbles are the idle share of both
stages. Beside them what an ideal pipeline of as many equal batches would have. Targets: bubbles of cost at most .4 of
those of tokens, tokens/s 1.15 times as many.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common import KEEP, SEED, Kept, arguments, finish, ratio, table
from serving import Load, flat, fleet, prompt, summary, warm_up
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import elastic
from elastic.assets import MODEL_DIR
from elastic.engines.base import Request
from elastic.engines.continuous import ContinuousEngine
from elastic.engines.continuous.chunk_profile import fit_cost
from elastic.engines.core.step import SequenceState
from elastic.engines.core.step_budget import CostBudget, StepBudget, TokenBudget
from elastic.engines.executor.paged_cache import RequestSlice
from elastic.planning.pipeline.chunk_cost import ChunkCost, ModelCost

LAYERS, LONGEST, MOST = 12, 4096, 1024
BUDGETS = (128, 256, 512)
"""Tokens of a step."""
BATCHES = (1, 2)
"""Of each instance, in flight."""
LEAST = 128
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def save_model(folder: Path, layers: int) -> Path:
    """Write a random Llama whose layers are small beside its contexts."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=2 * LONGEST,
        eos_token_id=None,
    )
    torch.manual_seed(SEED)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def fitted(path: Path, quick: bool) -> ModelCost:
    """Fit the cost of chunks in this process, on one core."""
    model = LlamaForCausalLM.from_pretrained(path).eval().requires_grad_(False)
    elastic.wrap(model, places=["cpu#0=2GiB"])
    engine = ContinuousEngine(model, max_batch_tokens=MOST, share_prefixes=False)
    try:
        return fit_cost(engine, MOST, most_s=2.0 if quick else 10.0)
    finally:
        engine.stop(drain=False)
        elastic.unwrap(model)


def queue(round_: int, quick: bool) -> list[Request]:
    """Draw prompts whose lengths have a heavy tail."""
    choose = random.Random(SEED + round_)
    lengths = [min(LONGEST, int(64 / (1 - choose.random()))) for _ in range(12 if quick else 64)]
    lengths = [min(256, length) for length in lengths] if quick else lengths
    return [Request(prompt(length, choose), 1, ignore_eos=True) for length in lengths]


def attention_share(path: Path, quick: bool) -> float:
    """Return which part of the time of steps attention takes, of one queue, in this process: of the CPU's time."""
    model = LlamaForCausalLM.from_pretrained(path).eval().requires_grad_(False)
    elastic.wrap(model, places=["cpu#0=2GiB"])
    engine = ContinuousEngine(model, max_batch_tokens=MOST // 2, share_prefixes=False)
    attend, spent = RequestSlice.attend, 0.0

    def timed(*args: Any) -> Any:
        nonlocal spent
        begin = time.thread_time()
        try:
            return attend(*args)
        finally:
            spent += time.thread_time() - begin

    def steps() -> float:
        whole = 0.0
        while step := scheduler.schedule():
            begin = time.thread_time()
            result = engine._runner.execute(step).result()
            whole += time.thread_time() - begin
            scheduler.update(step, result)
        return whole

    scheduler = engine._loop.scheduler
    try:
        with patch.object(RequestSlice, "attend", timed):
            for round_ in (1, 0):  # the first warms up
                for request in queue(round_, quick):
                    scheduler.add([SequenceState(request.id, request, 0, 0)])
                spent = 0.0
                whole = steps()
        return spent / whole
    finally:
        engine.stop(drain=False)
        elastic.unwrap(model)


@dataclass(frozen=True)
class Way:
    """How the queue of an instance is cut, and how many batches of it are in flight."""

    budget: StepBudget
    batches: int = 1


def ways_of(cost: ChunkCost, budgets: Sequence[int]) -> dict[str, Way]:
    """Return all ways by name."""
    by_cost = CostBudget(cost, LEAST, MOST)
    found: dict[str, Way] = {}
    for batches in BATCHES:
        suffix = "" if batches == 1 else f", {batches} batches"
        found |= {f"{count} tokens{suffix}": Way(TokenBudget(count), batches) for count in budgets}
        found[f"cost{suffix}"] = Way(by_cost, batches)
    return found


@contextmanager
def stages(path: Path, way: Way, layers: int) -> Iterator[elastic.Fleet]:
    """Serve with two stages, each with half of the layers."""
    engine_options = {
        "step_budget": way.budget,
        "cohorts": way.batches,
        "max_batch_tokens": MOST,
        "share_prefixes": False,
        "max_requests": 256,
    }
    with fleet(path, [(0,), (1,)], place="cpu#{}=2GiB", engine=engine_options, routing="least_load") as engine:
        first, second = (instance.name for instance in engine.status().instances)
        engine.drop(layers={first: range(layers // 2, layers), second: range(layers // 2)})
        warm_up(engine)
        yield engine


def core_seconds(pid: int) -> float:
    """Return the time that a process has used of its core."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


@dataclass(frozen=True)
class Played:
    """What came of a queue."""

    bubbles: float
    tokens_per_s: float
    steps: int


def play(engine: elastic.Fleet, requests: Sequence[Request]) -> Played:
    """Have a queue computed."""
    ranks = [rank.pid for rank in engine.status().ranks]
    steps = sum(instance.load.steps for instance in engine.status().instances)
    load, began, busy = Load(engine), time.perf_counter(), sum(map(core_seconds, ranks))
    for request in requests:
        load.submit(request)
    load.wait()
    span = time.perf_counter() - began
    return Played(
        bubbles=1 - (sum(map(core_seconds, ranks)) - busy) / (len(ranks) * span),
        tokens_per_s=sum(len(request.prompt) for request in requests) / span,
        steps=sum(instance.load.steps for instance in engine.status().instances) - steps,
    )


class Figures:
    """One way's, of all rounds."""

    def __init__(self, rounds: Sequence[Played]) -> None:
        self.bubbles = [played.bubbles for played in rounds]
        self.tokens_per_s = [played.tokens_per_s for played in rounds]
        self.steps = statistics.median(played.steps for played in rounds)

    def told(self) -> dict[str, Any]:
        return {
            "bubbles": summary(self.bubbles),
            "ideal_bubbles": 1 / (self.steps + 1),  # (stages - 1) / (batches + stages - 1)
            "tokens_per_s": summary(self.tokens_per_s),
            "microbatches": self.steps,
        }


def compared(ways: dict[str, Way], figures: dict[str, Figures], batches: int) -> dict[str, Any]:
    """Hold the cut by cost against the best by tokens, of those with so many batches in flight."""
    alike = {name: figures[name] for name, way in ways.items() if way.batches == batches}
    (cost,) = (alike.pop(name) for name in list(alike) if name.startswith("cost"))
    best = max(alike, key=lambda name: statistics.median(alike[name].tokens_per_s))
    return {
        "best_by_tokens": best,
        "bubbles_over_best": ratio(cost.bubbles, alike[best].bubbles),
        "tokens_per_s_over_best": ratio(cost.tokens_per_s, alike[best].tokens_per_s),
    }


def main() -> None:
    more = {"keep": KEEP, "tokens": {"nargs": "*", "type": int, "default": list(BUDGETS), "help": "budgets to try"}}
    options = arguments(__doc__.splitlines()[0], **more)
    if options.device != "cpu":
        sys.exit("this benchmark pins ranks to cores: it is for a CPU")
    rounds, layers = (1, 4) if options.quick else (min(options.rounds, 5), LAYERS)
    kept = Kept(options.keep)
    with tempfile.TemporaryDirectory() as folder:
        path = save_model(Path(folder), layers)
        share = kept.take("attention share", lambda: attention_share(path, options.quick))
        cost = ChunkCost(**kept.take("cost", lambda: asdict(fitted(path, options.quick).whole)))
        ways = ways_of(cost, options.tokens)
        played: dict[str, list[Played]] = {name: [] for name in ways}

        def take(name: str, round_: int) -> dict[str, Any]:
            with stages(path, ways[name], layers) as engine:
                return asdict(play(engine, queue(round_, options.quick)))

        for round_ in range(rounds):
            for name in random.sample(list(ways), len(ways)):
                played[name].append(Played(**kept.take(f"{round_}, {name}", partial(take, name, round_))))
                print(f"round {round_}, {name}: {played[name][-1]}", flush=True)
    figures = {name: Figures(all_) for name, all_ in played.items()}
    results = {
        **{name: one.told() for name, one in figures.items()},
        "attention_share": share,
        "void": share < 0.3,
        **{f"{batches} in flight": compared(ways, figures, batches) for batches in BATCHES},
    }
    table(["", ""], list(flat(results)))
    finish("microbatches", "cpu", results)


if __name__ == "__main__":
    main()
