"""Scales and zero points as kernels take them, and the optional parts that all devices share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from elastic.errors import ConfigError
from elastic.quant.codes import Codes
from elastic.quant.formats import Parts

Required = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Parts by name, with their shapes and dtypes."""


@dataclass(frozen=True)
class Coding:
    """How a kernel's numbers stand for a weight.

    The kernel knows `step * code`, `scale / step`, and an offset in place of the zero point:
    weight = scale * (code - middle) + factor * offset. The nearer the middle is to the zero points, the smaller is the
    offset, and the less it loses in bfloat16.
    """

    middle: int
    factor: int = 1
    step: int = 1

    def scales(self, codes: Codes) -> torch.Tensor:
        return codes.scales / self.step

    def offsets(self, codes: Codes) -> torch.Tensor:
        return (self.middle - codes.zeros) * codes.scales / self.factor

    def read(self, scales: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and zero points, float32; zero points are exact within 256 of the middle."""
        scales = scales.float() * self.step
        zeros = (self.middle - self.factor * offsets.float() / scales).round()
        return scales, torch.where(scales == 0, self.middle, zeros)


def extras(codes: Codes) -> dict[str, torch.Tensor]:
    """The parts `order`, int32 [inputs], and `input_scale`, float32 [inputs], where there is one."""
    parts = {}
    if codes.order is not None:
        parts["order"] = codes.order.to(torch.int32)
    if codes.input_scale is not None:
        parts["input_scale"] = codes.input_scale.float().contiguous()
    return parts


def read_extras(parts: Parts) -> dict[str, torch.Tensor | None]:
    """`order` and `input_scale` of `Codes`."""
    order = parts.get("order")
    return {"order": None if order is None else order.long(), "input_scale": parts.get("input_scale")}


def demand(x: torch.Tensor, parts: Parts, inputs: int, required: Required) -> None:
    """Refuse what a kernel might read beyond the end of. Raises `ConfigError`."""
    if x.dim() != 2 or x.shape[1] != inputs:
        raise ConfigError(f"x has the shape {tuple(x.shape)}, the matrix takes [tokens, {inputs}]")
    for name, (shape, dtype) in required.items():
        part = parts[name]
        if part.shape != shape or part.dtype != dtype or not part.is_contiguous():
            raise ConfigError(f"part {name!r} is {part.dtype} {tuple(part.shape)}; use a contiguous {dtype} {shape}")


def on_columns(x: torch.Tensor, parts: Parts) -> torch.Tensor:
    """What the packed columns are multiplied with: x divided by the input scale, in the order of the columns."""
    if "input_scale" in parts:
        x = (x.float() / parts["input_scale"]).to(x.dtype)
    return x.index_select(1, parts["order"]) if "order" in parts else x
