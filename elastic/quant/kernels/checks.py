"""What the parts of all integer formats have in common: the optional ones, and how a path looks at what it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from elastic.errors import ConfigError
from elastic.quant.formats.base import BoundKernel, Kernel, MatrixShape, PackedTensors
from elastic.quant.formats.integer import QuantizedMatrix

Required = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Parts by name, with their shapes and dtypes."""


def extras(codes: QuantizedMatrix) -> dict[str, torch.Tensor]:
    """The parts `order`, int32 [inputs], and `input_scale`, float32 [inputs], where there is one."""
    parts = {}
    if codes.order is not None:
        parts["order"] = codes.order.to(torch.int32)
    if codes.input_scale is not None:
        parts["input_scale"] = codes.input_scale.float().contiguous()
    return parts


def read_extras(parts: PackedTensors) -> dict[str, torch.Tensor | None]:
    """`order` and `input_scale` of `QuantizedMatrix`."""
    order = parts.get("order")
    return {"order": None if order is None else order.long(), "input_scale": parts.get("input_scale")}


def demand(parts: PackedTensors, required: Required) -> None:
    """Refuse parts that a kernel might read beyond the end of. Raises `ConfigError`."""
    for name, (shape, dtype) in required.items():
        part = parts[name]
        if part.shape != shape or part.dtype != dtype or not part.is_contiguous():
            raise ConfigError(f"part {name!r} is {part.dtype} {tuple(part.shape)}; use a contiguous {dtype} {shape}")


def on_columns(x: torch.Tensor, parts: PackedTensors) -> torch.Tensor:
    """What the packed columns are multiplied with: x divided by the input scale, in the order of the columns."""
    if "input_scale" in parts:
        x = (x.float() / parts["input_scale"]).to(x.dtype)
    order = parts.get("order")
    if order is None:
        return x
    if order.shape != x.shape[1:]:
        raise ConfigError(f"part 'order' has the shape {tuple(order.shape)}, the matrix {x.shape[1]} inputs")
    return x.index_select(1, order)


@dataclass(frozen=True)
class CheckedKernel:
    """A path from a kernel that is given at least one token, the columns of `on_columns`, and parts as they must be."""

    matrix: MatrixShape
    required: Required
    kernel: Kernel
    bind_kernel: Callable[[PackedTensors], BoundKernel] | None = None
    """The kernel for parts that stay as they are, where that is faster."""

    def __call__(self, x: torch.Tensor, parts: PackedTensors) -> torch.Tensor:
        demand(parts, self.required)
        return self._product(x, parts, lambda columns: self.kernel(columns, parts))

    def bind(self, parts: PackedTensors) -> BoundKernel:
        demand(parts, self.required)
        bound = self.bind_kernel(parts) if self.bind_kernel else lambda columns: self.kernel(columns, parts)
        return lambda x: self._product(x, parts, bound)

    def _product(self, x: torch.Tensor, parts: PackedTensors, kernel: BoundKernel) -> torch.Tensor:
        if x.dim() != 2 or x.shape[1] != self.matrix.inputs:
            raise ConfigError(f"x has the shape {tuple(x.shape)}, the matrix takes [tokens, {self.matrix.inputs}]")
        if not x.shape[0]:
            return x.new_empty(0, self.matrix.outputs)
        columns = on_columns(x.detach(), parts)
        rows = columns.flatten().view(columns.shape)  # contiguous() leaves one row odd strides, which _int_mm misreads
        return kernel(rows).to(x.dtype)
