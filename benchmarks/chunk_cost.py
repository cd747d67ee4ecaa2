"""How well the cost of chunks of prompts is predicted, beside models that do not see attention (KunServe, figure 15).

    python benchmarks/chunk_cost.py

A model whose attention counts (hidden 256, contexts up to 8,192) in the engine. Random batches of chunks, with and
without prefixes, decode steps among them: 60 to fit, 60 others to test, all in turn, medians of the rounds. Fitted are
the paper's equations; with what is read for a chunk, by layer and for the model as a whole; with a coefficient for each
kind of attention; without prefix (as DistServe); without self-attention (as NanoFlow); without attention; by tokens
alone. Errors are those of the batches held out, of all, and of those in which attention is 30 % of the time or more by
the paper's fit. Targets: a mean of 5 % for the best; 30 % at the most for one that is blind to attention, or the shapes
are wrong.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import SEED, arguments, budget, finish, table
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import elastic
from elastic.engines.continuous import ContinuousEngine
from elastic.engines.continuous.chunk_profile import Mix, profile_chunks
from elastic.planning.pipeline.chunk_cost import FORMS, BatchTiming, ChunkCost, ChunkProfile
from support.pipeline.chunk_errors import relative_errors

MOST_CHUNKS, MOST_NEW = 8, 2048
SHARE = 0.3


def model(device: str, *, quick: bool) -> LlamaForCausalLM:
    """Make a random Llama whose layers are small beside its contexts."""
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2 if quick else 4,
        num_attention_heads=4,
        max_position_embeddings=8192,
    )
    torch.manual_seed(SEED)
    return LlamaForCausalLM(config).to(device).eval().requires_grad_(False)


def mixes(count: int, longest: int, choose: random.Random) -> list[Mix]:
    """Draw batches: a few chunks of any lengths, the half of them behind a prefix, and in most some decode steps."""
    found = []
    for _ in range(count):
        chunks = []
        for _ in range(choose.randint(1, MOST_CHUNKS)):
            new = 1 if choose.random() < 0.4 else int(2 ** choose.uniform(4, 11)) * longest // 8192 + 1
            prefix = choose.randint(1, longest - new) if new == 1 or choose.random() < 0.5 else 0
            chunks.append((prefix, min(new, MOST_NEW)))
        found.append(tuple(chunks))
    return found


def attention_share(cost: ChunkCost, sample: BatchTiming) -> float:
    """Return the share of a batch's predicted time that attention takes."""
    terms = FORMS["two alphas"]
    seconds = cost.prefix * terms["prefix"](sample.chunks) + cost.own * terms["own"](sample.chunks)
    return seconds / sample.seconds


def errors(cost: ChunkCost, samples: Sequence[BatchTiming]) -> dict[str, float]:
    off = sorted(relative_errors(cost, samples))
    return {"mean": statistics.mean(off), "p50": statistics.median(off), "max": off[-1]}


def compare(profile: ChunkProfile, fitted: int) -> dict[str, Any]:
    """Fit the first batches of a profile, and predict the others with each model."""
    whole = profile.whole
    seen, held_out = whole[:fitted], whole[fitted:]
    apart = ChunkProfile(profile.layer[:fitted], profile.rest[:fitted], profile.layers).fit()
    costs = {"two alphas and reads, by layer": apart.whole, **{form: ChunkCost.fit(seen, form) for form in FORMS}}
    heavy = [sample for sample in held_out if attention_share(costs["paper"], sample) >= SHARE]
    return {
        "attention": statistics.mean(attention_share(costs["paper"], sample) for sample in held_out),
        "heavy": len(heavy),
        "held_out": len(held_out),
        "errors": {form: errors(cost, held_out) for form, cost in costs.items()},
        "errors_heavy": {form: errors(cost, heavy) for form, cost in costs.items()} if heavy else {},
        "layer": asdict(apart.layer),
        "rest": asdict(apart.rest),
        "samples": [[sample.chunks, sample.seconds] for sample in whole],
    }


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    fitted, longest = (20, 1024) if options.quick else (60, 8192)
    one = model(options.device, quick=options.quick)
    elastic.wrap(one, places=[f"{options.device}={budget(options.device, 4, 0.5)}"])
    engine = ContinuousEngine(one, max_batch_tokens=MOST_CHUNKS * MOST_NEW, share_prefixes=False)
    try:
        batches = mixes(2 * fitted, longest, random.Random(SEED))
        profile = profile_chunks(engine, batches, 3 if options.quick else options.rounds, SEED)
    finally:
        engine.stop()
    found = compare(profile, fitted)
    rows = []
    for form, off in found["errors"].items():
        heavy = found["errors_heavy"].get(form, {})
        rows.append([form, *(f"{off[q]:.1%}" for q in off), *(f"{heavy[q]:.1%}" for q in heavy)])
    print(f"attention takes {found['attention']:.0%} on the average; 30 % or more in {found['heavy']} of {fitted}")
    table(["model", "mean", "median", "most", "attention >= 30 %: mean", "median", "most"], rows)
    print(f"by layer: lambda is {found['layer']['shared'] / (found['layer']['chunk'] or 1):.0%} of gamma")
    finish("chunk_cost", options.device, found)


if __name__ == "__main__":
    main()
