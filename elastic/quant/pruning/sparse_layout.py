"""The layout of a sparse matrix: the weights that stay, and a bit for each weight that says where they are.

    packed  the weights that stay, row by row, in the dtype of the parameter: [outputs, kept of a row] where all rows
            keep as many (N:M), else [all that stay]
    mask    uint8 [outputs, inputs / 8]: bit i of byte b is of input 8 b + i
    starts  unstructured only: int64 [outputs], where the weights of a row begin

On CUDA a 2:4 matrix may have its mask in another form (`sparse_cuda`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from elastic.quant.formats.base import MatrixShape, PackedTensors
from elastic.quant.formats.pruned import SemiStructured, Sparse
from elastic.quant.kernels.checks import Required
from elastic.quant.kernels.workspace import scratch

Rows = tuple[int, int, int]
"""Some outputs: the first, the one after the last, and where their weights begin among those that stay."""


def pack(config: Sparse, pruned: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Store the weights of a matrix where the mask, bool, says that they stay; both [outputs, inputs]."""
    outputs, inputs = pruned.shape
    powers = 2 ** torch.arange(8, dtype=torch.uint8, device=mask.device)
    bits = (mask.view(outputs, inputs // 8, 8) * powers).sum(2, dtype=torch.uint8)
    values = pruned[mask]
    if isinstance(config, SemiStructured):
        return {"packed": values.view(outputs, -1), "mask": bits}
    counts = mask.sum(1)
    return {"packed": values, "mask": bits, "starts": counts.cumsum(0) - counts}


def required(config: Sparse, matrix: MatrixShape, dtype: torch.dtype) -> Required:
    """Return the shapes and dtypes of the parts that every matrix of this shape, with weights of a dtype, has."""
    outputs, inputs = matrix.outputs, matrix.inputs
    mask: Required = {"mask": ((outputs, inputs // 8), torch.uint8)}
    if isinstance(config, SemiStructured):
        return {"packed": ((outputs, inputs // config.of * config.kept), dtype), **mask}
    kept = inputs - config.removed(inputs)
    return {"packed": ((outputs * kept,), dtype), **mask, "starts": ((outputs,), torch.int64)}


def tiles(parts: PackedTensors, matrix: MatrixShape, weights: int) -> list[Rows]:
    """Return all outputs of a matrix, those with about so many weights at a time.

    The parts have the shapes that `required` says.
    """
    step = max(weights // matrix.inputs, 1)
    first = list(range(0, matrix.outputs, step))
    starts = parts["starts"][::step].tolist() if "starts" in parts else [0] * len(first)
    return list(zip(first, [*first[1:], matrix.outputs], starts, strict=True))


def expand(parts: PackedTensors, rows: Rows) -> torch.Tensor:
    """Return some outputs with zeros where no weight stays, [rows, inputs], in the dtype of the parts.

    On a CPU it is valid until this thread expands another tile.
    """
    start, stop, begin = rows
    values, mask = parts["packed"], parts["mask"][start:stop]
    dense = _buffer("dense", (mask.numel(), 8), values.dtype, mask.device).zero_()
    chosen = _buffer("bytes", (mask.numel(),), torch.int32, mask.device).copy_(mask.reshape(-1))
    if "starts" in parts:
        eight = _buffer("bits", (mask.numel(),), torch.int64, mask.device)
        torch.index_select(_tables(mask.device)[0], 0, chosen, out=eight)
        dense.masked_scatter_(eight.view(torch.bool).view(-1, 8), values[begin:])
    else:
        four = _buffer("places", (mask.numel(), 4), torch.int64, mask.device)
        torch.index_select(_tables(mask.device)[1], 0, chosen, out=four)
        dense.scatter_(1, four, values[start:stop].reshape(-1, 4))
    return dense.view(stop - start, -1)


def nibbles(mask: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the bits of the even and of the odd groups of four inputs, uint8 [outputs, inputs / 8] each."""
    yield mask & 15
    yield mask >> 4


def _buffer(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device == torch.device("cpu"):
        return scratch(f"sparse {name}", shape, dtype)
    return torch.empty(shape, dtype=dtype, device=device)


@functools.cache
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tables by byte: its eight bits as the bytes of a word, int64 [256]; and which four are set.

    The latter is int64 [256, 4]; a byte in which not four are set has zeros there.
    """
    with torch.inference_mode(False):
        bits = (torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1
        places = torch.zeros(256, 4, dtype=torch.int64)
        four = bits.sum(1) == 4
        places[four] = bits[four].nonzero()[:, 1].view(-1, 4)
        return bits.to(torch.uint8).view(torch.int64).view(-1).to(device), places.to(device)
