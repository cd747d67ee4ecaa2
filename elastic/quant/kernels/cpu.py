"""Products with matrices in integers on a CPU: a kernel in C++, torch's packed ones, and others built from fast
operations.

    compiled           integers times x rounded to 16 bits, by a kernel in C++ (integer_matmul.py)
    packed             torch's int4 and int8 kernels. They are vectorised for bfloat16 alone, so x is rounded to it
    expanded           weights to bfloat16, a cache-sized piece at a time, then a plain product in bfloat16
    expanded_float32   the same in float32
    dynamic            x rounded to int8, each token with a step of its own; the weights to int8 with one step for each
                       output, unless they are that already; then an integer product

Which is fastest depends on the number of tokens and on the machine. The error of "dynamic" is of another kind, as it
grows with the largest input of a token: with x = i s + e and w = j t + f, |e| <= s / 2 and |f| <= t / 2, where s and t
are 1 / 127 of the largest input of the token and (a bound of) the largest weight of the output,

    |error| <= s / 2 * sum(|w|) + t / 2 * sum(|i s|)

and outputs are rounded to bfloat16 besides, as in the other paths.

torch's int4 kernel has offsets in bfloat16; what they lose is added behind it. Its int8 kernel rounds products with
codes to bfloat16 before zero points could be taken off, so it is for symmetric codes alone.

No gradient flows through any of them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from elastic.quant.formats.base import BoundKernel, Kernel, KernelTarget, MatrixShape, PackedTensors
from elastic.quant.kernels.checks import BindKernel, CheckedKernel, bindable
from elastic.quant.kernels.compiled.integer_matmul import (
    WIDTHS,
    bind_int4,
    bind_int8,
    int4_matmul,
    multiplies_nibbles,
    multiplies_rows,
)
from elastic.quant.kernels.cpu_dequant import bytes_and_steps, floats, nibbles
from elastic.quant.kernels.cpu_layout import CpuLayout, zero_shifts
from elastic.quant.kernels.int4_layout import kernel_agrees
from elastic.quant.kernels.workspace import pad_rows, scratch

logger = logging.getLogger(__name__)


def paths(layout: CpuLayout, parts: PackedTensors) -> Mapping[str, Kernel]:
    """Return the kernels of this machine for x: [tokens, inputs]; "packed" where torch's kernel takes these groups."""
    made: RowKernels | Int4Kernels
    matrix, target = layout.matrix, layout.target
    if layout.whole_rows:
        made, torchs_own, compiled = RowKernels(matrix), "offsets" not in parts, multiplies_rows(matrix.outputs)
    else:
        made, torchs_own = Int4Kernels(layout), _int4_kernel_takes(layout.group, target)
        compiled = multiplies_nibbles(target.instructions, layout.group)
    kernels: dict[str, BindKernel] = {
        **({"compiled": made.bind_compiled} if compiled else {}),
        **({"packed": made.bind_packed} if torchs_own else {}),
        "expanded": bindable(functools.partial(made.expanded, dtype=torch.bfloat16)),
        "expanded_float32": bindable(functools.partial(made.expanded, dtype=torch.float32)),
        "dynamic": bindable(made.dynamic),
    }
    return {name: CheckedKernel(matrix, layout.required, kernel) for name, kernel in kernels.items()}


def _int4_kernel_takes(group: int, target: KernelTarget) -> bool:
    if target != KernelTarget.of(torch.device("cpu")):
        return False
    if not kernel_agrees(target.instructions):
        logger.warning("torch packs int4 for %s in an unknown order: its kernel is not used", target.instructions)
        return False
    return group in (32, 64, 128, 256)


@dataclass(frozen=True)
class RowKernels:
    """Kernels of int8 with one scale for each output."""

    matrix: MatrixShape

    def bind_compiled(self, parts: PackedTensors) -> BoundKernel:
        """Fix the parts of the kernel in C++, for x: [tokens, inputs] -> float32 [tokens, outputs]."""

        shifts = zero_shifts(parts)
        offsets = None if shifts is None else (shifts * parts["scales"])[0]
        product = bind_int8(parts["packed"], parts["scales"][0], offsets)
        return lambda x: product(x.float())

    def bind_packed(self, parts: PackedTensors) -> BoundKernel:
        """Fix the parts of torch's int8 kernel, without offsets, for x: [tokens, inputs] -> [tokens, outputs]."""
        kernel, packed, scales = torch.ops.aten._weight_int8pack_mm.default, parts["packed"], parts["scales"][0]
        return lambda x: kernel(x.to(torch.bfloat16), packed, scales)

    def expanded(self, x: torch.Tensor, parts: PackedTensors, dtype: torch.dtype) -> torch.Tensor:
        """Multiply x: [tokens, inputs] with codes less zero points in a dtype, exact in either; the scales follow.

        Returns [tokens, outputs] in bfloat16 or float32.
        """
        values, codes, shifts = pad_rows(x.to(dtype)), parts["packed"], zero_shifts(parts)
        y = torch.empty(values.shape[0], self.matrix.outputs, dtype=dtype)
        step = max(2**18 // self.matrix.inputs, 1)
        for start in range(0, self.matrix.outputs, step):
            piece = codes[start : start + step]
            weights = scratch("floats", tuple(piece.shape), dtype).copy_(piece)
            if shifts is not None:
                weights += shifts[:, start : start + step].t().to(dtype)
            y[:, start : start + step] = values @ weights.t()
        return y[: x.shape[0]] * parts["scales"]

    def dynamic(self, x: torch.Tensor, parts: PackedTensors) -> torch.Tensor:
        """Multiply x: [tokens, inputs], rounded to int8; returns float32 [tokens, outputs]."""
        codes, steps = _to_int8(x)
        y, shifts = int_product(codes, parts["packed"].t()).float(), zero_shifts(parts)
        if shifts is not None:
            y += codes.sum(1, keepdim=True) * shifts
        return y.mul_(steps).mul_(parts["scales"])


@dataclass(frozen=True)
class Int4Kernels:
    """Kernels of int4, int3, and int8 in groups."""

    layout: CpuLayout

    def bind_compiled(self, parts: PackedTensors) -> BoundKernel:
        """Fix the parts of the kernel in C++, for x: [tokens, inputs] -> float32 [tokens, outputs]."""
        layout, encoding, width = self.layout, self.layout.encoding, WIDTHS[self.layout.target.instructions]
        middle, factor = float(encoding.middle * encoding.step), float(encoding.factor)
        scales, outputs = parts["scales"], layout.matrix.outputs

        def by_slabs(x: torch.Tensor) -> torch.Tensor:
            """Multiply x: [tokens, inputs] with int3, whose nibbles are expanded in every product."""
            values, y = x.float(), torch.empty(x.shape[0], outputs, dtype=torch.float32)
            for columns, planes in nibbles(layout, parts):
                int4_matmul(values, planes, scales[:, columns], width, middle, factor, y[:, columns])
            return y

        if layout.config.bits == 3:
            return by_slabs
        ((_, planes),) = nibbles(layout, parts)
        product = bind_int4(planes, scales, width, middle, factor)
        return lambda x: product(x.float())

    def bind_packed(self, parts: PackedTensors) -> BoundKernel:
        """Fix the parts of torch's int4 kernel, for x: [tokens, inputs] -> [tokens, outputs]; int8 are two products."""
        layout, kernel = self.layout, torch.ops.aten._weight_int4pack_mm_for_cpu.default
        group, (upper_scales, *lower_scales), lost = layout.group, *self._scales_of_halves(parts["scales"])
        if layout.config.bits == 3:
            return lambda x: _with_offsets(self._packed_by_slabs(x.to(torch.bfloat16), parts), x, lost)
        ((_, planes),) = nibbles(layout, parts)
        upper, *lower = [plane.view(layout.matrix.outputs, layout.matrix.inputs // 2) for plane in planes]

        def product(x: torch.Tensor) -> torch.Tensor:
            """Multiply x: [tokens, inputs] with int4, or with the upper and the lower halves of int8 codes."""
            values = x.to(torch.bfloat16)
            y = kernel(values, upper, group, upper_scales)
            if lower:
                y = torch.add(kernel(values, lower[0], group, lower_scales[0]).float(), y, alpha=16)
            return _with_offsets(y, values, lost)

        return product

    def _packed_by_slabs(self, x: torch.Tensor, parts: PackedTensors) -> torch.Tensor:
        """Multiply x: bfloat16 [tokens, inputs] with int3, whose nibbles are expanded in every product, by slabs."""
        products = []
        for columns, (plane,) in nibbles(self.layout, parts):
            scales = parts["scales"][:, columns].contiguous()
            packed = plane.view(scales.shape[1], self.layout.matrix.inputs // 2)
            products.append(torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, self.layout.group, scales))
        return products[0] if len(products) == 1 else torch.cat(products, 1)

    def _scales_of_halves(self, scales: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Return scales and offsets for each plane of nibbles, and what offsets lost when they were rounded.

        scales: bfloat16 [groups, outputs, 2]; so are those returned. Lost is bfloat16 [groups, outputs]; None: nothing.
        Of int8 each half has an offset of its own: with a common one both products are large where zero points are far
        from the middle, and cancel each other after they were rounded.
        """
        scale, offset = scales.float().unbind(2)
        lost = self.layout.encoding.exact_offsets(scale, offset)
        if self.layout.config.bits != 8:
            lost -= offset
            return [scales.contiguous()], lost.to(torch.bfloat16) if lost.any() else None
        lower = torch.stack((scale, scale / 2), 2).to(torch.bfloat16)
        upper = torch.stack((scale, (lost - scale / 2) / 16), 2).to(torch.bfloat16)
        lost -= lower[:, :, 1].float() + 16 * upper[:, :, 1].float()
        return [upper, lower], lost.to(torch.bfloat16)

    def expanded(self, x: torch.Tensor, parts: PackedTensors, dtype: torch.dtype) -> torch.Tensor:
        """Multiply x: [tokens, inputs] with weights expanded to a dtype; returns [tokens, outputs] in that dtype."""
        values = pad_rows(x.to(dtype))
        y = torch.empty(values.shape[0], self.layout.matrix.outputs, dtype=dtype)
        for columns, weights in floats(self.layout, parts, dtype):
            y[:, columns] = values @ weights
        return y[: x.shape[0]]

    def dynamic(self, x: torch.Tensor, parts: PackedTensors) -> torch.Tensor:
        """Multiply x: [tokens, inputs], rounded to int8; returns float32 [tokens, outputs]."""
        codes, steps = _to_int8(x)
        y = torch.empty(x.shape[0], self.layout.matrix.outputs, dtype=torch.float32)
        for columns, weights, step in bytes_and_steps(self.layout, parts):
            torch.mul(int_product(codes, weights), step, out=y[:, columns])
        return y.mul_(steps)


def _to_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round x: [tokens, inputs] to int8; returns it with the step of each token, float32 [tokens, 1]."""
    steps = x.abs().amax(1, keepdim=True).float().clamp_(min=1e-30) / 127
    return (x / steps).round_().to(torch.int8), steps


def int_product(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Multiply int8 [tokens, inputs] and [inputs, outputs] exactly; returns int32 [tokens, outputs].

    Where a CPU has no VNNI, oneDNN adds two products in 16 bits, which overflow silently; of half the weights they fit.
    """
    if _sums_of_two_fit():
        return torch._int_mm(x, weights)
    return torch._int_mm(x, weights >> 1).mul_(2).add_(torch._int_mm(x, weights & 1))


@functools.cache
def _sums_of_two_fit() -> bool:
    """Return whether the largest int8 products are summed without overflow on this CPU."""
    largest = torch.full((64, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(largest, largest) == 64 * 127**2).all())


def _with_offsets(y: torch.Tensor, x: torch.Tensor, lost: torch.Tensor | None) -> torch.Tensor:
    """Add what offsets have lost, [groups, outputs], to y: [tokens, outputs], the product of x: [tokens, inputs]."""
    if lost is None:
        return y
    sums = x.to(torch.bfloat16).float().view(x.shape[0], lost.shape[0], -1).sum(2)
    return torch.addmm(y.float(), sums, lost.float())
