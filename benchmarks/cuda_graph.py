"""The cost of a wrapped model while nothing happens, where decode steps are captured in a CUDA graph.

    python benchmarks/cuda_graph.py --device cuda:0

One model with a static cache, a step captured and replayed, wrapped and not, in turn; the same steps run eagerly beside
it. A replay runs no hook, so that its target is 1.00 within the interval. A graph holds for as long as no action has
changed the model: capture again after one.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from typing import Any

import torch
from common import arguments, finish, llama, ratio, seconds, show, table
from transformers import StaticCache

import elastic

STEPS = 20


def eager(model: Any, device: str) -> Callable[[], None]:
    """Make decode steps with a static cache, all of the same token and position."""
    cache = StaticCache(config=model.config, max_cache_len=512)
    token = torch.ones(1, 1, dtype=torch.long, device=device)
    position = torch.full((1, 1), 256, dtype=torch.long, device=device)
    model(token.repeat(1, 256), past_key_values=cache)

    def step() -> None:
        model(token, past_key_values=cache, position_ids=position)

    return step


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """Capture a step in a graph, after three on a stream of its own; return its replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def compare(model: Any, device: str, kind: str, rounds: int) -> dict[str, Any]:
    """Time steps of the plain and the wrapped model, in turn."""
    times: dict[str, list[float]] = {"plain": [], "wrapped": []}
    for _ in range(rounds):
        for name in random.sample(list(times), 2):
            if name == "wrapped":
                elastic.wrap(model, places=[f"{device}=4GiB"])
            step = eager(model, device)
            run = captured(step) if kind == "graph" else step
            run()
            times[name].append(seconds(lambda run=run: [run() for _ in range(STEPS)], device) / STEPS)
            del step, run
            if name == "wrapped":
                elastic.unwrap(model)
    return {
        "step_us": {name: 1e6 * statistics.median(values) for name, values in times.items()},
        "ratio": ratio(times["wrapped"], times["plain"]),
    }


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    model = llama(4, torch.bfloat16, options.device, quick=options.quick)
    results = {kind: compare(model, options.device, kind, options.rounds) for kind in ("eager", "graph")}
    table(
        ["steps", "plain us", "wrapped us", "wrapped/plain"],
        [
            [kind, *(f"{value:.1f}" for value in row["step_us"].values()), show(row["ratio"])]
            for kind, row in results.items()
        ],
    )
    finish("cuda_graph", options.device, results)


if __name__ == "__main__":
    main()
