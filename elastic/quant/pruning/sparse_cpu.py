"""Products with sparse matrices on a CPU: some outputs at a time are expanded, zeros included, then multiplied.

    expanded           in bfloat16
    expanded_float32   in float32

torch has no kernel for N:M patterns on CPUs, and its general sparse one needs 4 bytes for each index. So a product
reads fewer bytes than a dense one, and computes more. No gradient flows through any of them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from elastic.quant.formats.base import BoundKernel, Kernel, MatrixShape, PackedTensors
from elastic.quant.formats.pruned import Sparse
from elastic.quant.kernels.checks import CheckedKernel
from elastic.quant.kernels.workspace import pad_rows, scratch
from elastic.quant.pruning.sparse_layout import expand, required, tiles

PIECE = 2**18
"""Weights expanded at a time: as float32 they fit a core's cache."""


def paths(config: Sparse, parts: PackedTensors, matrix: MatrixShape) -> Mapping[str, Kernel]:
    """Return the kernels for x: [tokens, inputs]."""
    shapes = required(config, matrix, parts["packed"].dtype)
    dtypes = {"expanded": torch.bfloat16, "expanded_float32": torch.float32}
    return {
        name: CheckedKernel(matrix, shapes, functools.partial(_bind, matrix=matrix, dtype=dtype))
        for name, dtype in dtypes.items()
    }


def _bind(parts: PackedTensors, *, matrix: MatrixShape, dtype: torch.dtype) -> BoundKernel:
    """Fix the parts of a product in a dtype, for x: [tokens, inputs] -> [tokens, outputs] in that dtype."""
    pieces = tiles(parts, matrix, PIECE)

    def product(x: torch.Tensor) -> torch.Tensor:
        values = pad_rows(x.to(dtype))
        y = torch.empty(values.shape[0], matrix.outputs, dtype=dtype)
        for rows in pieces:
            weights = expand(parts, rows)
            if weights.dtype != dtype:
                weights = scratch("floats", tuple(weights.shape), dtype).copy_(weights)
            y[:, rows[0] : rows[1]] = values @ weights.t()
        return y[: x.shape[0]]

    return product
