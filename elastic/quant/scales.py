"""Scales and zero points as kernels take them, and the optional parts that all devices share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from elastic.quant.codes import Codes
from elastic.quant.formats import Parts


@dataclass(frozen=True)
class Offset:
    """A zero point as a float: a kernel computes weight = scale * (code - middle) + factor * offset."""

    middle: int
    factor: int = 1

    def of(self, codes: Codes) -> torch.Tensor:
        return (self.middle - codes.zeros) * codes.scales / self.factor

    def zeros(self, scales: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """The whole number that the offset, rounded to bfloat16, came from; it is exact below 256 / factor."""
        zeros = (self.middle - self.factor * offsets.float() / scales.float()).round()
        return torch.where(scales == 0, self.middle, zeros)


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


def on_columns(x: torch.Tensor, parts: Parts) -> torch.Tensor:
    """What the packed columns are multiplied with: x divided by the input scale, in the order of the columns."""
    if "input_scale" in parts:
        x = (x.float() / parts["input_scale"]).to(x.dtype)
    return x.index_select(1, parts["order"]) if "order" in parts else x
