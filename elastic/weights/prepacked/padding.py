"""Products with few rows that are computed with more: with four, oneDNN's take less time than with two on some CPUs.

With fewer it reads a matrix more slowly than memory gives it. Whether it does is timed, once for each number of inputs:
matrices with the same inputs are padded alike, whether they are multiplied apart or as one, and one that was away and
comes back as before, whatever thread brings it.
"""

from __future__ import annotations

import functools
from itertools import cycle
from statistics import median

import torch
import torch.nn.functional as F

from elastic.memory.backends.device_time import seconds_of
from elastic.weights.prepacked.onednn import OneDNNLayout, find_layout, multiply

FULL_ROWS = 4
"""Rows that fewer are padded to."""
WORTH = 0.9
"""Of the time without padding: what it must take at the most, as smaller matrices gain less."""
FEWEST_INPUTS = 512
"""Matrices with fewer are read from a cache."""
TIMED_BYTES = 2**24
"""Of a matrix that is timed."""
COPIES = 4
"""Of it that are used in turn: in a model, weights come from memory, not from cache."""
REPEATS = 15


def multiply_padded(
    x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, padded: tuple[int, ...]
) -> torch.Tensor:
    """Multiply as `multiply` does, x: [..., inputs], few rows with zeros after them as `padded_rows` says."""
    rows = x.numel() // x.shape[-1]
    if not 0 < rows <= len(padded) or padded[rows - 1] == rows:
        return multiply(x, matrix, bias)
    product = multiply(F.pad(x.reshape(rows, -1), (0, 0, 0, padded[rows - 1] - rows)), matrix, bias)
    return product[:rows].view(*x.shape[:-1], -1)


@functools.cache
def padded_rows(inputs: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Return how many rows a product with 1, 2, 3 rows is to have; timed with the threads that torch uses at first."""
    unpadded = tuple(range(1, FULL_ROWS))
    outputs = TIMED_BYTES // (inputs * dtype.itemsize) // 64 * 64
    layout = find_layout((outputs, inputs), dtype) if inputs >= FEWEST_INPUTS and outputs else None
    if layout is None:
        return unpadded
    *seconds, full = product_seconds(layout)
    return tuple(FULL_ROWS if full < WORTH * few else rows for rows, few in zip(unpadded, seconds, strict=True))


def product_seconds(layout: OneDNNLayout) -> list[float]:
    """Return how long products with 1 to `FULL_ROWS` rows take, by the clock."""
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.no_grad():
        shapes = (layout.shape, (FULL_ROWS, layout.shape[1]))
        weight, x = (torch.randn(shape, generator=generator).to(layout.dtype) for shape in shapes)
        packed = [layout.pack(weight) for _ in range(COPIES)]
        matrices = cycle([layout.view(stored) for stored in packed])
        times: list[list[float]] = [[] for _ in range(FULL_ROWS)]
        for _ in range(REPEATS):
            for rows, of_rows in enumerate(times, 1):
                few, matrix = x[:rows], next(matrices)
                of_rows.append(seconds_of(lambda few=few, matrix=matrix: multiply(few, matrix, None), weight.device))  # type: ignore[misc]
    return [median(of_rows) for of_rows in times]
