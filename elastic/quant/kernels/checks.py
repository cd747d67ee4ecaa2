"""Common ground of the integer kernels: optional parts, the checks before a product, and the plain reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from elastic.errors import ConfigError
from elastic.quant.formats.base import BoundKernel, Kernel, MatrixShape, PackedTensors, PartShapes
from elastic.quant.formats.integer import QuantizedMatrix

Required = PartShapes
"""Shapes and dtypes of the parts that a kernel reads."""


def extras(codes: QuantizedMatrix) -> dict[str, torch.Tensor]:
    """Return the parts `order`, int32 [inputs], and `input_scale`, float32 [inputs], as far as the codes have them."""
    parts = {}
    if codes.order is not None:
        parts["order"] = codes.order.to(torch.int32)
    if codes.input_scale is not None:
        parts["input_scale"] = codes.input_scale.float().contiguous()
    return parts


def read_extras(parts: PackedTensors) -> dict[str, torch.Tensor | None]:
    """Return `order`, int64 [inputs], and `input_scale`, float32 [inputs], as fields of `QuantizedMatrix`."""
    order = parts.get("order")
    return {"order": None if order is None else order.long(), "input_scale": parts.get("input_scale")}


def torch_int4_group(size: int) -> int:
    """Return the largest group that torch's int4 kernels know and that divides `size` inputs, or else `size`."""
    return next((group for group in (256, 128, 64, 32) if size % group == 0), size)


def reference_kernel(value: Callable[[PackedTensors], torch.Tensor]) -> Kernel:
    """Return the slow kernel that all others are tested against, from a function that expands parts.

    value: parts -> the matrix, float32 [outputs, inputs].
    """
    return lambda x, parts: (x.float().contiguous() @ value(parts).t()).to(x.dtype)


BindKernel = Callable[[PackedTensors], BoundKernel]
"""A kernel that is given its parts first, so that it can prepare them once."""


def bindable(kernel: Kernel) -> BindKernel:
    """Return a kernel that has nothing to prepare as one that is given its parts first."""
    return lambda parts: lambda x: kernel(x, parts)


@dataclass(frozen=True)
class CheckedKernel:
    """A path around a kernel, which gets at least one token, packed columns, and parts of the right shapes."""

    matrix: MatrixShape
    required: Required
    bind_kernel: BindKernel

    def __call__(self, x: torch.Tensor, parts: PackedTensors) -> torch.Tensor:
        """Multiply x: [tokens, inputs]. Raises `ConfigError` where x or a part has a wrong shape or dtype."""
        return self.bind(parts)(x)

    def bind(self, parts: PackedTensors) -> BoundKernel:
        """Check parts and prepare them, for x: [tokens, inputs] -> [tokens, outputs] in the dtype of x.

        Raises `ConfigError` for parts that a kernel might read beyond the end of.
        """
        for name, (shape, dtype) in self.required.items():
            part = parts[name]
            if part.shape != shape or part.dtype != dtype or not part.is_contiguous():
                problem = f"part {name!r} is {part.dtype} {tuple(part.shape)}"
                raise ConfigError(f"{problem}; use a contiguous {dtype} {shape}")
        kernel, (outputs, inputs) = self.bind_kernel(parts), (self.matrix.outputs, self.matrix.inputs)
        selects, device = "input_scale" in parts or "order" in parts, next(iter(parts.values())).device

        def product(x: torch.Tensor) -> torch.Tensor:
            """Multiply x: [tokens, inputs], with few operators: each takes as long as few tokens do."""
            if x.dim() != 2 or x.shape[1] != inputs:
                raise ConfigError(f"x has the shape {tuple(x.shape)}, the matrix takes [tokens, {inputs}]")
            if x.device != device:  # a kernel in C++ would read whatever has that address here
                raise ConfigError(f"x is on {x.device}, the matrix on {device}; move one to the other")
            if not x.shape[0]:
                return x.new_empty(0, outputs)
            rows = x.detach() if x.requires_grad else x
            if selects:
                rows = _select_columns(rows, parts)
            if rows.stride() != (inputs, 1):  # contiguous() leaves one row odd strides, which _int_mm misreads
                rows = rows.flatten().view(rows.shape)
            y = kernel(rows)
            return y if y.dtype is x.dtype else y.to(x.dtype)

        return product


def _select_columns(x: torch.Tensor, parts: PackedTensors) -> torch.Tensor:
    """Divide x by the input scale, and put its inputs in the order of the packed columns.

    Quotients of float16 may be beyond its range: they are float32.
    """
    if "input_scale" in parts:
        quotients = x.float() / parts["input_scale"]
        x = quotients if x.dtype == torch.float16 else quotients.to(x.dtype)
    order = parts.get("order")
    if order is None:
        return x
    if order.shape != x.shape[1:]:
        raise ConfigError(f"part 'order' has the shape {tuple(order.shape)}, the matrix {x.shape[1]} inputs")
    return x.index_select(1, order)
