"""Which full matrices are worth packing: products are timed, once for each shape and dtype."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from functools import partial
from itertools import cycle

import torch
import torch.nn.functional as F

from elastic.memory.backends.device_time import time_ratio
from elastic.weights.prepacked.joined import joined_layout
from elastic.weights.prepacked.onednn import OneDNNLayout, find_layout, multiply

ROWS = (8, 16, 32, 64, 128)
"""Tokens of the products that are timed: of batches that decode, which matrices are packed for, and of prompts."""
REPEATS = 15
SMALLEST_BYTES = 2**19
"""Of a matrix that is packed. A product with a smaller one is mostly its call, which costs more than a plain one's,
and in a model, between other code, more than calls that follow one another: in vLLM a step of the 2.6M model took
10.1 ms with plain matrices, and 11.7 with those packed that were faster so."""
TIMED_BYTES = 2**26
"""Of a larger matrix, as heads of large vocabularies are, products with so much of it are timed."""
ROTATED_BYTES = 2**26
"""Bytes of all the copies of a matrix that are used in turn: in a model, weights come from memory, not from cache."""


def prepacked_layout(weight: torch.Tensor, together: Sequence[torch.Tensor] = ()) -> OneDNNLayout | None:
    """Return the layout that a full matrix, [outputs, inputs], on a CPU is to have in its pages; None: plain.

    Packed where the products take less time on average of their ratios, with the threads that torch uses now: its own,
    or one with all matrices of `together`, which are given the same inputs, against one with each.
    """
    if weight.ndim != 2 or weight.device.type != "cpu" or not weight.is_contiguous():
        return None
    threads, shapes = torch.get_num_threads(), tuple((matrix.shape[0], matrix.shape[1]) for matrix in together)
    nbytes = sum(matrix.nbytes for matrix in together)
    if len(shapes) > 1 and nbytes >= SMALLEST_BYTES and _faster_together(shapes, weight.dtype, threads):
        return find_layout((weight.shape[0], weight.shape[1]), weight.dtype)
    if weight.nbytes < SMALLEST_BYTES:
        return None
    return _faster_layout((weight.shape[0], weight.shape[1]), weight.dtype, threads)


@functools.cache
def _faster_layout(shape: tuple[int, int], dtype: torch.dtype, threads: int) -> OneDNNLayout | None:
    layout = find_layout(shape, dtype)
    if layout is None:
        return None
    timed = find_layout((min(shape[0], max(1, TIMED_BYTES // (shape[1] * dtype.itemsize))), shape[1]), dtype)
    ratios = packed_time_ratios(timed or layout)
    return layout if math.prod(ratios) < 1 else None


@functools.cache
def _faster_together(shapes: tuple[tuple[int, int], ...], dtype: torch.dtype, threads: int) -> bool:
    layouts = [layout for shape in shapes if (layout := find_layout(shape, dtype)) is not None]
    joined = joined_layout(tuple(layouts), threads) if len(layouts) == len(shapes) else None
    return joined is not None and math.prod(packed_time_ratios(joined, [outputs for outputs, _ in shapes])) < 1


def packed_time_ratios(layout: OneDNNLayout, outputs: Sequence[int] = ()) -> list[float]:
    """Return how long packed products take, as a share of plain ones, for each number of rows.

    With `outputs`, as a share of one plain product for each part of so many of the matrix's outputs.
    """
    generator = torch.Generator().manual_seed(0)  # the program's own numbers stay as they are
    with torch.inference_mode(False), torch.no_grad():
        weight = torch.randn(layout.shape, generator=generator).to(layout.dtype)
        count = max(1, min(ROTATED_BYTES // weight.nbytes, 64))
        plain = cycle([torch.split(weight.clone(), list(outputs or weight.shape[:1])) for _ in range(count)])
        packed = [layout.pack(weight) for _ in range(count)]
        matrices = cycle([layout.view(stored) for stored in packed])
        ratios = []
        for rows in ROWS:
            x = torch.randn(rows, layout.shape[1], generator=generator).to(layout.dtype)
            after = partial(lambda x: multiply(x, next(matrices), None), x)
            before = partial(lambda x: [F.linear(x, part) for part in next(plain)], x)
            ratios.append(time_ratio(after, before, weight.device, REPEATS))
    return ratios
