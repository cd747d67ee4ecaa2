"""The layout of a matrix in integers on a CPU: its parts, with shapes and dtypes.

    int8 of one group   packed  int8 [outputs, inputs], code - 128
                        scales  bfloat16 [1, outputs]
                        offsets float32 [1, outputs], unless symmetric (bfloat16 in earlier files)
    int8 in groups      packed  uint8 [2, outputs * inputs / 2], the upper and the lower halves of the codes as nibbles
    int4                packed  uint8 [outputs * inputs / 2], nibbles
    int3                packed  uint8 [outputs * inputs * 3 / 8], squeezed nibbles
                        scales  bfloat16 [groups, outputs, 2], scale and offset

Nibbles lie as torch's int4 kernel for the target's instructions wants them (int4_layout.py). The kernel knows groups of
32 to 256 inputs; for larger ones, scales are repeated. Scales are bfloat16 because the kernels demand it: those of
checkpoints are float16 and change by up to 2 ** -9 of their value, as in the packages that run such files through the
same kernels.
"""

from __future__ import annotations

import torch

from elastic.quant.formats.base import KernelTarget, MatrixShape, PackedTensors, PartShapes
from elastic.quant.formats.integer import Integers, QuantizedMatrix
from elastic.quant.formats.scale_encoding import ScaleEncoding
from elastic.quant.kernels.checks import Required, extras, read_extras, torch_int4_group
from elastic.quant.kernels.int4_layout import pack_nibbles, squeeze, unpack_nibbles, unsqueeze

BYTES = ScaleEncoding(128)
NIBBLES = ScaleEncoding(8)
NIBBLES_OF_3_BITS = ScaleEncoding(4, step=2)
"""Codes in the upper three bits, so that the kernel's fixed middle, 8, is the middle of the codes."""
TWO_NIBBLES = ScaleEncoding(136, factor=17)
"""code = 16 upper + lower; one pair of scale and offset serves both, for 16 (upper - 8) + (lower - 8) = code - 136."""


class CpuLayout:
    """How a matrix of one shape lies for one instruction set: what the table above says of it."""

    def __init__(self, config: Integers, matrix: MatrixShape, target: KernelTarget) -> None:
        self.config, self.matrix, self.target = config, matrix, target
        self.whole_rows = config.bits == 8 and config.group_size in (-1, matrix.inputs)
        """Whether this is int8 with one scale for each output: another kernel, and other parts."""
        self.group = torch_int4_group(config.inputs_per_group(matrix.inputs))
        """How many inputs share a scale in the parts: the largest group that the kernel knows, or the config's."""
        grouped = {8: TWO_NIBBLES, 4: NIBBLES, 3: NIBBLES_OF_3_BITS}[config.bits]
        self.encoding = BYTES if self.whole_rows else grouped
        """Of the scales in the parts."""
        self.required: Required = self._required()
        """Shapes and dtypes of the parts that every matrix of this shape has."""
        offsets = {"offsets": ((1, matrix.outputs), torch.float32)}
        self.part_shapes: PartShapes = {
            **self.required,
            **(offsets if self.whole_rows and not config.symmetric else {}),
        }
        """Of all parts, but for those that codes may have besides."""

    def _required(self) -> Required:
        outputs, inputs = self.matrix.outputs, self.matrix.inputs
        if self.whole_rows:
            return {"packed": ((outputs, inputs), torch.int8), "scales": ((1, outputs), torch.bfloat16)}
        half = outputs * inputs // 2
        packed = {8: (2, half), 4: (half,), 3: (half * 3 // 4,)}[self.config.bits]
        scales = (inputs // self.group, outputs, 2)
        return {"packed": (packed, torch.uint8), "scales": (scales, torch.bfloat16)}

    def pack(self, codes: QuantizedMatrix) -> dict[str, torch.Tensor]:
        """Lay codes, uint8 [outputs, inputs], out as the parts that the table above names."""
        if self.whole_rows:
            scales, offsets = (row.t().contiguous() for row in self.encoding.encode(codes))
            parts = {"packed": (codes.codes ^ 128).view(torch.int8).contiguous(), "scales": scales.to(torch.bfloat16)}
            return {**parts, **({} if self.config.symmetric else {"offsets": offsets}), **extras(codes)}
        stored, instructions = codes.codes * self.encoding.step, self.target.instructions
        if self.config.bits == 8:
            packed = torch.stack([pack_nibbles(half, instructions) for half in (stored >> 4, stored & 15)])
        else:
            packed = pack_nibbles(stored, instructions)
        if self.config.bits == 3:
            packed = squeeze(packed, self.matrix.outputs, self.matrix.inputs)
        return {"packed": packed, "scales": self.encoding.encode_pairs(codes, self.group), **extras(codes)}

    def unpack(self, parts: PackedTensors) -> QuantizedMatrix:
        """Read the codes, uint8 [outputs, inputs], with scales and zeros, float32 [outputs, groups], from parts."""
        scales = parts["scales"]
        if self.whole_rows:
            codes = parts["packed"].view(torch.uint8) ^ 128
            offsets = parts.get("offsets", torch.zeros_like(scales))
        else:
            codes = self._stored_codes(parts["packed"]) // self.encoding.step
            repeats = self.config.inputs_per_group(self.matrix.inputs) // self.group
            scales, offsets = scales[::repeats].unbind(2)
        scales, zeros = self.encoding.decode(scales, offsets)
        return QuantizedMatrix(codes, scales, zeros, **read_extras(parts))

    def _stored_codes(self, packed: torch.Tensor) -> torch.Tensor:
        """Read the codes as they are stored, times the step of their encoding: uint8 [outputs, inputs]."""
        outputs, inputs = self.matrix.outputs, self.matrix.inputs
        halves = packed.view(2, -1) if self.config.bits == 8 else packed.view(1, -1)
        if self.config.bits == 3:
            halves = unsqueeze(packed, outputs, inputs).view(1, -1)
        upper, *lower = [unpack_nibbles(half, outputs, inputs, self.target.instructions) for half in halves]
        return upper << 4 | lower[0] if lower else upper


def zero_shifts(parts: PackedTensors) -> torch.Tensor | None:
    """Return 128 - zero point of each output of int8 of one group, float32 [1, outputs]; None: all are 0."""
    if "offsets" not in parts:
        return None
    scales = parts["scales"].float()
    return torch.where(scales == 0, 0.0, (parts["offsets"] / scales).round_())
