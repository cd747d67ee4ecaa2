"""Scales and zero points as kernels take them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from elastic.quant.formats.integer import QuantizedMatrix


@dataclass(frozen=True)
class ScaleEncoding:
    """How a kernel's numbers stand for a weight.

    The kernel knows `step * code`, `scale / step`, and an offset in place of the zero point:
    weight = scale * (code - middle) + factor * offset. The nearer the middle is to the zero points, the smaller is the
    offset, and the less it loses in bfloat16.
    """

    middle: int
    factor: int = 1
    step: int = 1

    def scales(self, codes: QuantizedMatrix) -> torch.Tensor:
        return codes.scales / self.step

    def offsets(self, codes: QuantizedMatrix) -> torch.Tensor:
        return (self.middle - codes.zeros) * codes.scales / self.factor

    def read(self, scales: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and zero points, float32; zero points are exact within 256 of the middle."""
        scales = scales.float() * self.step
        zeros = (self.middle - self.factor * offsets.float() / scales).round()
        return scales, torch.where(scales == 0, self.middle, zeros)
