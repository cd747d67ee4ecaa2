"""Scales and zero points in the form that kernels take."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from elastic.quant.formats.integer import QuantizedMatrix


@dataclass(frozen=True)
class ScaleEncoding:
    """The way in which a kernel's numbers stand for a weight.

    The kernel knows `step * code`, `scale / step`, and an offset in place of the zero point:
    weight = scale * (code - middle) + factor * offset. The nearer the middle is to the zero points, the smaller is the
    offset, and the less it loses in bfloat16: all weights of a group are off by the same, up to 2 ** -9 of it. It is a
    whole number of scales, so that kernels other than torch's take it without the loss (`exact_offsets`).
    """

    middle: int
    factor: int = 1
    step: int = 1

    def encode(self, codes: QuantizedMatrix) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the kernel's scales, rounded to bfloat16, and their offsets, each float32 [outputs, groups]."""
        scales = (codes.scales / self.step).to(torch.bfloat16).float()
        return scales, (self.middle - codes.zeros) * (scales * self.step) / self.factor

    def encode_pairs(self, codes: QuantizedMatrix, group: int) -> torch.Tensor:
        """Return scale and offset side by side, bfloat16 [inputs / group, outputs, 2], contiguous.

        `group` divides the inputs that share a scale in the codes: larger groups are repeated.
        """
        pairs = torch.stack(self.encode(codes), 2).transpose(0, 1).to(torch.bfloat16)
        repeats = codes.codes.shape[1] // codes.groups // group
        return pairs.repeat_interleave(repeats, 0).contiguous()

    def exact_offsets(self, scales: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Return factor * offset as it was before it was rounded to bfloat16, float32.

        scales, offsets: float32, of any one shape. Exact for zero points within 256 / step of the middle.
        """
        whole = (self.factor * offsets / scales).round_()
        return torch.where(scales == 0, 0.0, whole * scales)

    def decode(self, scales: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scales and zero points of `QuantizedMatrix`, float32 [outputs, groups].

        scales, offsets: [groups, outputs], bfloat16. Zero points are exact within 256 of the middle.
        """
        scales = scales.float() * self.step
        zeros = (self.middle - self.factor * offsets.float() / scales).round()
        zeros = torch.where(scales == 0, self.middle, zeros)
        return scales.t().contiguous(), zeros.t().contiguous()
