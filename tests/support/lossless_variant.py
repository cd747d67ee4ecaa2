"""A variant that loses nothing: weights that bfloat16 can hold, in half the bytes. So swaps are tested bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import elastic
from elastic.quant.formats.base import Format, Kernel, PackedTensors, PartShapes, register


@dataclass(frozen=True)
class Halves:
    """The config."""


class HalvesFormat(Format):
    def part_shapes(self, dtype: torch.dtype) -> PartShapes:
        return {"packed": ((self.matrix.outputs, self.matrix.inputs), torch.bfloat16)}

    def quantize(self, weight: torch.Tensor, inputs: torch.Tensor | None) -> PackedTensors:
        return {"packed": weight.to(torch.bfloat16).contiguous()}

    def value(self, parts: PackedTensors) -> torch.Tensor:
        return parts["packed"].float()

    def paths(self, parts: PackedTensors) -> Mapping[str, Kernel]:
        return {"reference": lambda x, parts: F.linear(x, parts["packed"].to(x.dtype))}


register(Halves, HalvesFormat)
HALF = elastic.Variant("half", Halves())


@torch.no_grad()
def exact(model: Any) -> Any:
    """The model with weights that the variant holds exactly."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(torch.bfloat16).to(parameter.dtype))
    return model
