"""What a model pays, while nothing happens, for layers that could be shared: `shards=4` beside `shards=1`.

    python benchmarks/shards_at_rest.py [--rounds 11]

The last matrix of a feed-forward network lies with its inputs outermost then. Steps of the same tokens, in turn, in
bfloat16 and float32; "without a kernel": its products are torch's. Target: at most 1.01 of a step.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from common import arguments, finish, paired, ratio, show, small_model, table

import elastic
from elastic.weights.shards import transposed_linear

SHAPES = {"6 x 768": (6, 768, 2048), "2 x 2,048": (2, 2048, 5504)}
"""Layers, hidden size and that of their networks."""
TOKENS = (1, 8, 16, 128)
"""Of a step; the last is a prompt."""
STEPS = 5


def make_model(shape: tuple[int, int, int], dtype: torch.dtype, device: str, shards: int) -> Any:
    layers, hidden, intermediate = shape
    model = small_model(hidden, intermediate, layers, dtype, device)
    return elastic.wrap(model, places=[device], shards=shards)


def steps(model: Any, tokens: int, *, with_kernel: bool = True) -> None:
    ids = torch.arange(tokens, device=model.device)[None]
    if with_kernel:
        for _ in range(STEPS):
            model(ids, use_cache=False)
        return
    with patch.object(transposed_linear, "MOST_TOKENS", 0):
        steps(model, tokens)


def main() -> None:
    options = arguments(__doc__)
    results = []
    for name, shape in {"2 x 64": (2, 64, 256)}.items() if options.quick else SHAPES.items():
        for dtype in (torch.bfloat16, torch.float32):
            whole, parted = (make_model(shape, dtype, options.device, shards) for shards in (1, 4))
            for tokens in TOKENS:
                works = {"whole": partial(steps, whole, tokens), "parted": partial(steps, parted, tokens)}
                if dtype is torch.bfloat16:
                    works["without a kernel"] = partial(steps, parted, tokens, with_kernel=False)
                times = paired(works, options.device, options.rounds)
                ratios = {way: ratio(times[way], times["whole"]) for way in works if way != "whole"}
                results.append({"shape": name, "dtype": str(dtype), "tokens": tokens, "of_whole": ratios})
    ways = ("parted", "without a kernel")
    rows = [
        [row["shape"], row["dtype"].removeprefix("torch."), row["tokens"]]
        + [show(row["of_whole"][way]) if way in row["of_whole"] else "" for way in ways]
        for row in results
    ]
    table(["layers x size", "dtype", "tokens", "shards=4", "without a kernel"], rows)
    finish("shards_at_rest", options.device, results)


if __name__ == "__main__":
    main()
