"""A variant that loses nothing: weights that bfloat16 can hold, in half the bytes. So swaps are tested bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import elastic
from elastic.quant.formats.base import Kernel, KernelTarget, MatrixShape, PackedTensors, register


@dataclass(frozen=True)
class Halves:
    """The config."""


class HalvesFormat:
    def supports(self, config: Any, matrix: MatrixShape) -> str | None:
        return None

    def quantize(
        self, config: Any, weight: torch.Tensor, inputs: torch.Tensor | None, target: KernelTarget
    ) -> PackedTensors:
        return {"packed": weight.to(torch.bfloat16).contiguous()}

    def value(self, config: Any, parts: PackedTensors, matrix: MatrixShape, target: KernelTarget) -> torch.Tensor:
        return parts["packed"].float()

    def paths(
        self, config: Any, parts: PackedTensors, matrix: MatrixShape, target: KernelTarget
    ) -> Mapping[str, Kernel]:
        return {"reference": lambda x, parts: F.linear(x, parts["packed"].to(x.dtype))}

    def repack(
        self, config: Any, parts: PackedTensors, matrix: MatrixShape, packed_for: KernelTarget, target: KernelTarget
    ) -> PackedTensors:
        return parts


register(Halves, HalvesFormat())
HALF = elastic.Variant("half", Halves())


@torch.no_grad()
def exact(model: Any) -> Any:
    """The model with weights that the variant holds exactly."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(torch.bfloat16).to(parameter.dtype))
    return model
