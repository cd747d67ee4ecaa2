"""Products with matrices in integers on CUDA.

    packed     torch's int4 kernel. It takes bfloat16 alone, so x is rounded to it
    triton     a kernel of our own for what that one does not take (int8, int3, other groups), in the dtype of x
    expanded   weights to the dtype of x, some outputs at a time, then a plain product: for many tokens

No gradient flows through any of them.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch

from elastic.quant.formats.base import Kernel, KernelTarget, MatrixShape, PackedTensors
from elastic.quant.formats.integer import Integers
from elastic.quant.kernels.checks import CheckedKernel
from elastic.quant.kernels.cuda_layout import CODINGS, codes_of, group_of, pack, required, tiled, unpack

__all__ = ["pack", "paths", "unpack"]

PIECE = 2**24
"""Weights expanded at a time."""
logger = logging.getLogger(__name__)


def paths(config: Integers, parts: PackedTensors, matrix: MatrixShape, target: KernelTarget) -> Mapping[str, Kernel]:
    """The paths for this shape; without triton there are fewer."""
    product = CudaKernels(config, matrix)
    made: dict[str, Kernel] = {"expanded": product.expanded}
    if tiled(config, matrix):
        made["packed"] = product.packed
    elif _has_triton():
        made["triton"] = product.triton
    shapes = required(config, matrix)
    return {name: CheckedKernel(matrix, shapes, kernel) for name, kernel in made.items()}


@functools.cache
def _has_triton() -> bool:
    found = importlib.util.find_spec("triton") is not None
    if not found:
        logger.warning("triton is not installed: int8 and int3 products expand their weights; pip install triton")
    return found


@dataclass(frozen=True)
class CudaKernels:
    config: Integers
    matrix: MatrixShape

    def packed(self, x: torch.Tensor, parts: PackedTensors) -> torch.Tensor:
        group = group_of(self.config, self.matrix)
        values = x.to(torch.bfloat16)
        return cast(torch.Tensor, torch.ops.aten._weight_int4pack_mm(values, parts["packed"], group, parts["scales"]))

    def triton(self, x: torch.Tensor, parts: PackedTensors) -> torch.Tensor:
        from elastic.quant.kernels.triton import product

        group = group_of(self.config, self.matrix)
        return product(x, parts["packed"], parts["scales"], self.config.bits, group)

    def expanded(self, x: torch.Tensor, parts: PackedTensors) -> torch.Tensor:
        y = x.new_empty(x.shape[0], self.matrix.outputs)
        step = max(PIECE // self.matrix.inputs // 8 * 8, 8)
        for start in range(0, self.matrix.outputs, step):
            stop = min(start + step, self.matrix.outputs)
            y[:, start:stop] = x @ self._weights(parts, start, stop).to(x.dtype).t()
        return y

    def _weights(self, parts: PackedTensors, start: int, stop: int) -> torch.Tensor:
        """Those of some outputs, float32 [outputs, inputs]."""
        rows = slice(start // 8, stop // 8) if tiled(self.config, self.matrix) else slice(start, stop)
        codes = codes_of(self.config, parts["packed"][rows], self.matrix)
        scales, offsets = parts["scales"][:, start:stop].float().permute(2, 1, 0).unsqueeze(3)
        grouped = codes.view(*scales.shape[:2], -1).float() - CODINGS[self.config.bits].middle
        return torch.addcmul(offsets, grouped, scales).flatten(1)
