"""What stages of a pipeline wait for each other, by how a queue of prompts is cut into microbatches.

    python benchmarks/microbatches.py [--tokens 128 256 512] [--rounds 5] [--keep FILE]

Two ranks, pinned to a core each, are the stages of two instances, with as many batches of each in flight as instances
have by themselves (one while both have work), or two. The queue is there from the start: prompts of 64 to 4,096 tokens,
few of them long (1:64), for one token each. The model is one whose attention counts (12 layers, hidden 256). By the
most tokens of a step (`max_batch_tokens`) it is cut

- by tokens, as Sarathi does: steps are as large as they may be
- by cost (KunServe, section 4.3), as engines do it with `Overload(lookahead=True)`: step by step
- by halves of equal cost, as the paper's figure 11 does, and into as many batches of equal cost as by tokens: plans of
  the whole queue (`planned_steps.py`), whose steps may have up to four times as many tokens

The best of the budgets counts. The cost is fitted first, in this process, as ranks do it (`fit_cost`). Rounds play the
same queue to all, in random order, with fresh processes. Attention has to take .3 of the time of steps at least,
measured in this process before the rounds: else the figures are void.

What ranks did with their time is theirs to say (`fleet.look(rank).times`, by their own clocks): a stage is in a bubble
when it does not compute and there is unfinished work. Told are the bubbles of both stages, of twice the time from the
first request to the last answer, and `busy`, the share of it in which the less busy stage computed. Beside them what an
ideal pipeline of as many equal batches would have. Targets: bubbles of cost at most .4 of those of tokens, tokens/s
1.15 times as many, both stages busy .75.
"""

from __future__ import annotations

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
from planned_steps import PlannedSteps, by_halves, by_number
from serving import Load, flat, fleet, prompt, summary, warm_up
from sim_runs import stage_times
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import elastic
from elastic.assets import MODEL_DIR
from elastic.engines.base import Request
from elastic.engines.continuous import ContinuousEngine
from elastic.engines.continuous.chunk_profile import fit_cost
from elastic.engines.continuous.ranks.cohorts import LEAST_SHARE
from elastic.engines.core.step import SequenceState
from elastic.engines.core.step_budget import CostBudget, StepBudget, TokenBudget
from elastic.engines.executor.paged_cache import RequestSlice
from elastic.planning.pipeline.chunk_cost import ChunkCost, ModelCost

LAYERS, LONGEST, MOST = 12, 4096, 1024
BUDGETS = (128, 256, 512)
"""The most tokens of a step."""
BATCHES = {"own number": None, "two": 2}
"""Of each instance, in flight; None: as many as an instance has by itself."""
KINDS = ("tokens", "cost", "halves", "equal parts")


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

    kind: str
    budget: StepBudget
    most_tokens: int
    in_flight: str = "own number"


def ways_of(cost: ChunkCost, budgets: Sequence[int]) -> dict[str, Way]:
    """Return all ways by name."""
    ways = {}
    for most in budgets:
        cuts: dict[str, StepBudget] = {
            "tokens": TokenBudget(most),
            "cost": CostBudget(cost, max(1, most // LEAST_SHARE), most, usual=most),
            "halves": PlannedSteps(by_halves, cost, most, 4 * most),
            "equal parts": PlannedSteps(by_number, cost, most, 4 * most),
        }
        ways |= {
            f"{kind} {most}, {in_flight}": Way(kind, cuts[kind], most, in_flight)
            for kind in KINDS
            for in_flight in BATCHES
        }
    return ways


@contextmanager
def stages(path: Path, way: Way, layers: int) -> Iterator[elastic.Fleet]:
    """Serve with two stages, each with half of the layers."""
    engine_options = {
        "step_budget": way.budget,
        "cohorts": BATCHES[way.in_flight],
        "max_batch_tokens": way.most_tokens,
        "share_prefixes": False,
        "max_requests": 256,
    }
    with fleet(path, [(0,), (1,)], place="cpu#{}=2GiB", engine=engine_options, routing="least_load") as engine:
        first, second = (instance.name for instance in engine.status().instances)
        engine.drop(layers={first: range(layers // 2, layers), second: range(layers // 2)})
        warm_up(engine)
        yield engine


@dataclass(frozen=True)
class Played:
    """What came of a queue."""

    bubbles: float
    busy: float
    tokens_per_s: float
    steps: int


def play(engine: elastic.Fleet, requests: Sequence[Request]) -> Played:
    """Have a queue computed."""
    steps = sum(instance.load.steps for instance in engine.status().instances)
    before, load, began = stage_times(engine), Load(engine), time.perf_counter()
    for request in requests:
        load.submit(request)
    load.wait()
    span, after = time.perf_counter() - began, stage_times(engine)
    return Played(
        bubbles=sum(after[name].bubble_s - before[name].bubble_s for name in before) / (len(before) * span),
        busy=min(after[name].busy_s - before[name].busy_s for name in before) / span,
        tokens_per_s=sum(len(request.prompt) for request in requests) / span,
        steps=sum(instance.load.steps for instance in engine.status().instances) - steps,
    )


class Figures:
    """One way's, of all rounds."""

    def __init__(self, rounds: Sequence[Played]) -> None:
        self.bubbles = [played.bubbles for played in rounds]
        self.busy = [played.busy for played in rounds]
        self.tokens_per_s = [played.tokens_per_s for played in rounds]
        self.steps = statistics.median(played.steps for played in rounds)

    def told(self) -> dict[str, Any]:
        return {
            "bubbles": summary(self.bubbles),
            "busy": summary(self.busy),
            "ideal_bubbles": 1 / (self.steps + 1),  # (stages - 1) / (batches + stages - 1)
            "tokens_per_s": summary(self.tokens_per_s),
            "microbatches": self.steps,
        }


def compared(ways: dict[str, Way], figures: dict[str, Figures], in_flight: str) -> dict[str, Any]:
    """Hold the best of each kind against the best by tokens, with as many batches in flight."""
    of_kind = {
        kind: [name for name, way in ways.items() if (way.kind, way.in_flight) == (kind, in_flight)] for kind in KINDS
    }
    best = {
        kind: max(names, key=lambda name: statistics.median(figures[name].tokens_per_s))
        for kind, names in of_kind.items()
    }
    by_tokens = figures[best["tokens"]]
    return {
        "best": best,
        "bubbles_over_tokens": {
            kind: ratio(figures[best[kind]].bubbles, by_tokens.bubbles) for kind in KINDS if kind != "tokens"
        },
        "tokens_per_s_over_tokens": {
            kind: ratio(figures[best[kind]].tokens_per_s, by_tokens.tokens_per_s) for kind in KINDS if kind != "tokens"
        },
    }


def main() -> None:
    tokens = {"nargs": "*", "type": int, "default": list(BUDGETS), "help": "the most of a step, to try"}
    more = {"keep": KEEP, "tokens": tokens}
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
        **{f"{in_flight} in flight": compared(ways, figures, in_flight) for in_flight in BATCHES},
    }
    table(["", ""], list(flat(results)))
    finish("microbatches", "cpu", results)


if __name__ == "__main__":
    main()
