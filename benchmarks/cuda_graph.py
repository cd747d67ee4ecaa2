"""A decode step of a wrapped model beside those of the plain model, run eagerly and captured in a CUDA graph.

    python benchmarks/cuda_graph.py --device cuda:0

One model with a static cache. A wrapped model cannot be captured, because its pages may move: beside the eager steps
this says what a user of graphs gives up by wrapping, beside the graph what is left to be gained.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from typing import Any

import torch
from common import CACHE, arguments, finish, llama, ratio, seconds, show, table
from transformers import StaticCache

import elastic

STEPS = 20


def eager(model: Any, device: str) -> Callable[[], None]:
    """Make decode steps with a static cache, all of the same token and position."""
    cache = StaticCache(config=model.config, max_cache_len=512)
    token = torch.ones(1, 1, dtype=torch.long, device=device)
    position = torch.full((1, 1), 256, dtype=torch.long, device=device)
    model(token.repeat(1, 256), **{CACHE: cache})

    def step() -> None:
        model(token, **{CACHE: cache}, position_ids=position)

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


def compare(model: Any, device: str, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of a step of each kind, in turn."""
    times: dict[str, list[float]] = {"plain": [], "plain, captured": [], "wrapped": []}
    for _ in range(rounds):
        for name in random.sample(list(times), len(times)):
            if name == "wrapped":
                elastic.wrap(model, places=[f"{device}=4GiB"])
            step = eager(model, device)
            run = captured(step) if name == "plain, captured" else step
            run()
            times[name].append(seconds(lambda run=run: [run() for _ in range(STEPS)], device) / STEPS)
            del step, run
            if name == "wrapped":
                elastic.unwrap(model)
    return times


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    times = compare(llama(4, torch.bfloat16, options.device, quick=options.quick), options.device, options.rounds)
    results = {
        "step_us": {name: 1e6 * statistics.median(values) for name, values in times.items()},
        "wrapped_over_eager": ratio(times["wrapped"], times["plain"]),
        "wrapped_over_captured": ratio(times["wrapped"], times["plain, captured"]),
    }
    table(
        [*(f"{name}, us" for name in times), "wrapped/plain", "wrapped/captured"],
        [
            [
                *(f"{value:.1f}" for value in results["step_us"].values()),
                show(results["wrapped_over_eager"]),
                show(results["wrapped_over_captured"]),
            ]
        ],
    )
    finish("cuda_graph", options.device, results)


if __name__ == "__main__":
    main()
