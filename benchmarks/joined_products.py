"""Tokens per second of the engine with prepacked matrices that are multiplied at once, one by one, and with plain ones.

    python benchmarks/random_model.py --shape 100m --out build/models/100m
    python benchmarks/joined_products.py --model build/models/100m [--threads 1] [--rounds 5]

Three engines over models of their own in one process; batches of 16 requests of 32 + 64 tokens, greedy, in turn and in
another order each round. Ratios are to the first.
"""

from __future__ import annotations

import argparse
import random
import statistics
from contextlib import nullcontext
from unittest.mock import patch

import torch
from common import SEED, finish, ratio, show, table
from serving import Load
from transformers import AutoModelForCausalLM

import elastic
from elastic.engines.base import Request
from elastic.engines.continuous import ContinuousEngine
from elastic.weights.prepacked import source

KINDS = ("joined", "one by one", "plain")


def make_engine(model: str, kind: str) -> ContinuousEngine:
    wrapped = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    apart = patch.object(source, "join", lambda layouts, packed: None)
    with nullcontext() if kind == "joined" else apart:
        elastic.wrap(wrapped, places=["cpu=1500MiB"], prepack=kind != "plain")
    return ContinuousEngine(wrapped, max_requests=64, share_prefixes=False)


def tokens_per_s(engine: ContinuousEngine) -> float:
    choose, load = random.Random(SEED), Load(engine)
    for _ in range(16):
        load.submit(Request(tuple(choose.randrange(3, 400) for _ in range(32)), 64, ignore_eos=True))
    load.wait()
    return load.tokens_per_s()


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    random.seed(SEED)
    engines = {kind: make_engine(options.model, kind) for kind in KINDS}
    speeds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for engine in engines.values():
        engine.start()
        tokens_per_s(engine)
    for _ in range(options.rounds):
        for kind in random.sample(KINDS, len(KINDS)):
            speeds[kind].append(tokens_per_s(engines[kind]))
    for engine in engines.values():
        engine.stop(drain=False)
    ratios = {kind: ratio(speeds[kind], speeds["joined"]) for kind in KINDS}
    medians = {kind: statistics.median(speeds[kind]) for kind in KINDS}
    rows = [[kind, f"{medians[kind]:.0f}", show(ratios[kind])] for kind in KINDS]
    table(["matrices", "tokens/s", "of joined"], rows)
    finish("joined_products", "cpu", {"threads": options.threads, "tokens_per_s": medians, "of_joined": ratios})


if __name__ == "__main__":
    main()
