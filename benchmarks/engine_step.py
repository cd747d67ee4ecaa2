"""What the engine itself costs a step: scheduler, tables, metadata, sampling, delivery; the model's share left out.

    python benchmarks/engine_step.py

All requests decode; a step is the time between two tokens of one of them. "engine" has a model that returns its logits
at once, "whole" the real one. Targets, for the engine: .5 ms at 16 requests, 1.2 ms at 64.
"""

from __future__ import annotations

import statistics
import threading
from types import SimpleNamespace
from typing import Any

import torch
from common import arguments, finish, table
from transformers import AutoModelForCausalLM

import elastic
from elastic.assets import MODEL_DIR
from elastic.engines.base import Output, Request
from elastic.engines.continuous import ContinuousEngine

PROMPT, NEW, SKIPPED = 32, 300, 100


class InstantModel(torch.nn.Module):
    """Has the attention metadata made, as the first layer of a kind does, and attends to nothing."""

    def __init__(self, groups: int, most: int, vocabulary: int) -> None:
        super().__init__()
        self.device = torch.device("cpu")
        self._groups = groups
        self._logits = torch.rand(1, most, vocabulary)

    def forward(
        self, input_ids: torch.Tensor, paged_cache: Any, logits_to_keep: torch.Tensor | None = None, **_: Any
    ) -> Any:
        for group in range(self._groups):
            cache = paged_cache.cache
            made, parts = paged_cache.metadata(group), cache.parts(group, tuple(range(cache.kv_shards)))
            for index in (made.write, *(sequences.read for sequences in made.decodes)):
                index.of(parts)
        kept = input_ids.shape[1] if logits_to_keep is None else len(logits_to_keep)
        return SimpleNamespace(logits=self._logits[:, :kept])


def step_ms(engine: ContinuousEngine, count: int) -> list[float]:
    """Return the milliseconds of each step in which all requests decode."""
    ended, times = threading.Semaphore(0), []

    def listen(output: Output) -> None:
        if output.finish is not None:
            ended.release()

    def watch(output: Output) -> None:
        times.append(output.at_s)
        listen(output)

    for i in range(count):
        prompt = tuple(3 + (i + token) % 50 for token in range(PROMPT))
        engine.submit(Request(prompt, NEW, ignore_eos=True), listen if i else watch)
    for _ in range(count):
        ended.acquire()
    return [1e3 * (after - before) for before, after in zip(times[SKIPPED:], times[SKIPPED + 1 :], strict=False)]


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    elastic.wrap(model, places=["cpu=1GiB"])
    rows, results = [], {}
    for count in (1, 16, 64):
        with ContinuousEngine(model, share_prefixes=False) as engine:
            whole = step_ms(engine, count)
        with ContinuousEngine(model, share_prefixes=False) as engine:
            engine._runner._model = InstantModel(1, 512, model.config.vocab_size)
            engine._runner.graphs = None  # of the real model
            alone = step_ms(engine, count)
        figures = {
            "engine_ms": statistics.median(alone),
            "engine_p90_ms": statistics.quantiles(alone, n=10)[-1],
            "whole_ms": statistics.median(whole),
        }
        results[str(count)] = figures | {"share": figures["engine_ms"] / figures["whole_ms"]}
        rows.append([count, *(f"{value:.2f}" for value in figures.values()), f"{results[str(count)]['share']:.0%}"])
    table(["requests", "engine ms", "p90", "whole step ms", "share"], rows)
    finish("engine_step", options.device, results)


if __name__ == "__main__":
    main()
