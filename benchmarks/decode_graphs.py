"""Decode steps that are replayed, beside the same engine calling the model at each step.

    python benchmarks/decode_graphs.py [--device cuda:0] [--threads 2]

One engine, in turn with and without a hook on the model's last norm that does nothing: with it no step is replayed. A
turn is a batch of requests of 8 + 64 tokens, the order drawn in each round. Beside the ratios: the longest wait for a
token in the batch in which steps of so many sequences were captured and checked, and the pause of a layer's release and
restore, behind which all is captured anew. On a GPU replays are CUDA graphs (`cuda_graphs`).
"""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any

import torch
from common import arguments, budget, finish, llama, paired, ratio, show, small_model, table
from sampling import Prompts, serve
from transformers import AutoModelForCausalLM

import elastic
from elastic.assets import MODEL_DIR
from elastic.engines.base import Output, Request
from elastic.engines.continuous import ContinuousEngine

PROMPT, NEW, FEW = 8, 64, 24
PAUSES = 5


class Batches:
    """Batches of so many requests in one engine, replayed or not."""

    def __init__(self, engine: ContinuousEngine, model: Any, count: int) -> None:
        self._engine, self._norm, self._count = engine, model.model.norm, count
        self._prompts = Prompts(model.config.vocab_size)

    def run(self, replayed: bool, tokens: int = NEW) -> float:
        """Serve one; return the longest time between two tokens of its first request, in seconds."""
        requests = [Request(self._prompts.next(PROMPT), tokens, ignore_eos=True) for _ in range(self._count)]
        at_s: list[float] = []

        def seen(output: Output) -> None:
            if output.request == requests[0].id and output.tokens:
                at_s.append(output.at_s)

        handle = None if replayed else self._norm.register_forward_hook(lambda *_: None)
        serve(self._engine, requests, seen)
        if handle is not None:
            handle.remove()
        return max(later - earlier for earlier, later in pairwise(at_s))


def measure(model: Any, variant: str, count: int, device: str, rounds: int) -> dict[str, Any]:
    """Compare batches of so many requests, all layers in a variant; full: ""."""
    place = f"{device}={budget(device, 2, 0.5)}"
    rt = elastic.wrap(model, places=[place], variants=[variant] if variant else []).elastic
    if variant:
        rt.swap(range(model.config.num_hidden_layers), variant)
    with ContinuousEngine(model, max_requests=count, share_prefixes=False, cuda_graphs=True) as engine:
        batches = Batches(engine, model, count)
        batches.run(replayed=False)
        longest = {"eager": batches.run(replayed=False), "captured": batches.run(replayed=True)}
        works = {"eager": lambda: batches.run(replayed=False), "replayed": lambda: batches.run(replayed=True)}
        times = paired(works, device, rounds, warmup=1)
        pauses: dict[str, list[float]] = {"eager": [], "replayed": []}
        for _ in range(PAUSES):
            for name in pauses:
                batches.run(name == "replayed", FEW)
                for act in (rt.release, rt.restore):
                    act([0])
                    pauses[name].append(rt.events()[-1].pause_ms)
    elastic.unwrap(model)
    return {
        "tokens_s": {name: count * NEW / statistics.median(t) for name, t in times.items()},
        "tokens_ratio": ratio(times["eager"], times["replayed"]),
        "longest_token_ms": {name: 1e3 * s for name, s in longest.items()},
        "pause_ms": {name: statistics.median(ms) for name, ms in pauses.items()},
    }


def main() -> None:
    options = arguments(__doc__.splitlines()[0], threads={"type": int, "default": 1})
    torch.set_num_threads(options.threads)
    device, cpu = options.device, options.device == "cpu"
    dtype = torch.float32 if cpu else torch.bfloat16
    models = {
        "2.6M": lambda: AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=dtype).to(device).eval(),
        "130M GQA": lambda: llama(4, dtype, device, quick=options.quick),
        **({} if cpu or options.quick else {"7B": lambda: small_model(4096, 11008, 32, dtype, device)}),
    }
    rounds, results = 2 if options.quick else options.rounds, {}
    for name, make in models.items():
        for variant in ("", "int4"):
            for count in (1,) if options.quick else (1, 16) if cpu else (1, 16, 64):
                results[f"{name}, {variant or 'full'}, {count}"] = measure(make(), variant, count, device, rounds)
    table(
        [
            "model, weights, requests",
            "tokens/s eager",
            "replayed",
            "ratio",
            "longest ms",
            "captured",
            "pause",
            "replayed",
        ],
        [
            [
                name,
                *(f"{figure:,.0f}" for figure in of["tokens_s"].values()),
                show(of["tokens_ratio"]),
                *(f"{ms:.1f}" for ms in of["longest_token_ms"].values()),
                *(f"{ms:.2f}" for ms in of["pause_ms"].values()),
            ]
            for name, of in results.items()
        ],
    )
    finish("decode_graphs", device, results)


if __name__ == "__main__":
    main()
