"""Products with matrices in integers on a CPU: torch's packed kernels, and others built from what is fast.

    packed             torch's int4 and int8 kernels. They are vectorised for bfloat16 alone, so x is rounded to it
    expanded           weights to bfloat16, a cache-sized piece at a time, then a plain product in bfloat16
    expanded_float32   the same in float32
    dynamic            x rounded to int8, each token with a step of its own; the weights to int8 with one step for each
                       output, unless they are that already; then an integer product

Which is fastest depends on the number of tokens and on the machine. The error of "dynamic" is of another kind, as it
grows with the largest input of a token: with x = i s + e and w = j t + f, |e| <= s / 2 and |f| <= t / 2, where s and t
are 1 / 127 of the largest input of the token and (a bound of) the largest weight of the output,

    |error| <= s / 2 * sum(|w|) + t / 2 * sum(|i s|)

and offsets and outputs are rounded to bfloat16 besides, as in the other paths.

No gradient flows through any of them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from elastic.quant.formats.base import BoundKernel, Kernel, KernelTarget, MatrixShape, PackedTensors
from elastic.quant.formats.integer import Integers
from elastic.quant.kernels.checks import CheckedKernel
from elastic.quant.kernels.cpu_dequant import bytes_and_steps, floats, nibbles
from elastic.quant.kernels.cpu_layout import kernel_group, pack, required, unpack, whole_rows
from elastic.quant.kernels.int4_layout import kernel_agrees
from elastic.quant.kernels.workspace import scratch

__all__ = ["pack", "paths", "unpack"]

logger = logging.getLogger(__name__)


def paths(config: Integers, parts: PackedTensors, matrix: MatrixShape, target: KernelTarget) -> Mapping[str, Kernel]:
    """The paths of this machine; "packed" where torch's kernel takes these groups."""
    made = RowKernels(matrix) if whole_rows(config, matrix) else Int4Kernels(config, matrix, target)
    kernels: dict[str, Kernel] = {
        "expanded": functools.partial(made.expanded, dtype=torch.bfloat16),
        "expanded_float32": functools.partial(made.expanded, dtype=torch.float32),
        "dynamic": made.dynamic,
    }
    if isinstance(made, RowKernels) or _int4_kernel_takes(kernel_group(config, matrix), target):
        kernels = {"packed": made.packed, **kernels}
    shapes = required(config, matrix)
    return {
        name: CheckedKernel(matrix, shapes, kernel, made.bind_packed if name == "packed" and made.binds else None)
        for name, kernel in kernels.items()
    }


def _int4_kernel_takes(group: int, target: KernelTarget) -> bool:
    if target != KernelTarget.of(torch.device("cpu")):
        return False
    if not kernel_agrees(target.instructions):
        logger.warning("torch packs int4 for %s in an unknown order: its kernel is not used", target.instructions)
        return False
    return group in (32, 64, 128, 256)


@dataclass(frozen=True)
class RowKernels:
    """int8 with one scale for each output."""

    matrix: MatrixShape
    binds: ClassVar[bool] = True

    def bind_packed(self, parts: PackedTensors) -> BoundKernel:
        kernel, packed, scales = torch.ops.aten._weight_int8pack_mm.default, parts["packed"], parts["scales"][0]
        return lambda x: _with_offsets(kernel(x.to(torch.bfloat16), packed, scales), x, parts)

    def packed(self, x: torch.Tensor, parts: PackedTensors) -> torch.Tensor:
        y = torch.ops.aten._weight_int8pack_mm(x.to(torch.bfloat16), parts["packed"], parts["scales"][0])
        return _with_offsets(y, x, parts)

    def expanded(self, x: torch.Tensor, parts: PackedTensors, dtype: torch.dtype) -> torch.Tensor:
        """The codes are exact in either dtype; the scales follow."""
        values, codes = x.to(dtype), parts["packed"]
        y = torch.empty(x.shape[0], self.matrix.outputs, dtype=dtype)
        step = max(2**18 // self.matrix.inputs, 1)
        for start in range(0, self.matrix.outputs, step):
            piece = codes[start : start + step]
            weights = scratch("floats", tuple(piece.shape), dtype).copy_(piece)
            y[:, start : start + step] = values @ weights.t()
        return _with_offsets(y * parts["scales"], x, parts)

    def dynamic(self, x: torch.Tensor, parts: PackedTensors) -> torch.Tensor:
        codes, steps = _to_int8(x)
        y = int_product(codes, parts["packed"].t()).float()
        return _with_offsets(y.mul_(steps).mul_(parts["scales"]), x, parts)


@dataclass(frozen=True)
class Int4Kernels:
    """int4, int3, and int8 in groups."""

    config: Integers
    matrix: MatrixShape
    target: KernelTarget

    @property
    def binds(self) -> bool:
        """The three bits of int3 are expanded in every product."""
        return self.config.bits != 3

    def bind_packed(self, parts: PackedTensors) -> BoundKernel:
        kernel, group = torch.ops.aten._weight_int4pack_mm_for_cpu.default, kernel_group(self.config, self.matrix)
        scales = parts["scales"].contiguous()
        ((_, planes),) = nibbles(self.config, parts, self.matrix)
        upper, *lower = [plane.view(self.matrix.outputs, self.matrix.inputs // 2) for plane in planes]
        if not lower:
            return lambda x: kernel(x.to(torch.bfloat16), upper, group, scales)

        def product(x: torch.Tensor) -> torch.Tensor:
            values = x.to(torch.bfloat16)
            return torch.add(kernel(values, lower[0], group, scales), kernel(values, upper, group, scales), alpha=16)

        return product

    def packed(self, x: torch.Tensor, parts: PackedTensors) -> torch.Tensor:
        values, group = x.to(torch.bfloat16), kernel_group(self.config, self.matrix)
        products = [
            self._product(values, planes, group, parts["scales"][:, columns])
            for columns, planes in nibbles(self.config, parts, self.matrix)
        ]
        return products[0] if len(products) == 1 else torch.cat(products, 1)

    def _product(self, x: torch.Tensor, planes: torch.Tensor, group: int, scales: torch.Tensor) -> torch.Tensor:
        scales = scales.contiguous()
        shape = (scales.shape[1], self.matrix.inputs // 2)
        upper, *lower = [
            torch.ops.aten._weight_int4pack_mm_for_cpu(x, plane.view(shape), group, scales) for plane in planes
        ]
        return torch.add(lower[0], upper, alpha=16) if lower else upper

    def expanded(self, x: torch.Tensor, parts: PackedTensors, dtype: torch.dtype) -> torch.Tensor:
        values = x.to(dtype)
        y = torch.empty(x.shape[0], self.matrix.outputs, dtype=dtype)
        for columns, weights in floats(self.config, parts, self.matrix, self.target, dtype):
            y[:, columns] = values @ weights
        return y

    def dynamic(self, x: torch.Tensor, parts: PackedTensors) -> torch.Tensor:
        codes, steps = _to_int8(x)
        y = torch.empty(x.shape[0], self.matrix.outputs)
        for columns, weights, step in bytes_and_steps(self.config, parts, self.matrix, self.target):
            torch.mul(int_product(codes, weights), step, out=y[:, columns])
        return y.mul_(steps)


def _to_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x as int8, and the step of each token, float32 [tokens, 1]."""
    steps = x.abs().amax(1, keepdim=True).float().clamp_(min=1e-30) / 127
    return (x / steps).round_().to(torch.int8), steps


def int_product(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The exact product of int8 [tokens, inputs] and [inputs, outputs], int32.

    Where a CPU has no VNNI, oneDNN adds two products in 16 bits, which overflow silently; of half the weights they fit.
    """
    if _pairs_fit():
        return torch._int_mm(x, weights)
    return torch._int_mm(x, weights >> 1).mul_(2).add_(torch._int_mm(x, weights & 1))


@functools.cache
def _pairs_fit() -> bool:
    largest = torch.full((64, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(largest, largest) == 64 * 127**2).all())


def _with_offsets(y: torch.Tensor, x: torch.Tensor, parts: PackedTensors) -> torch.Tensor:
    """Zero points other than 128 add the same to every weight of an output."""
    return y + x.float().sum(1, keepdim=True) * parts["offsets"] if "offsets" in parts else y
