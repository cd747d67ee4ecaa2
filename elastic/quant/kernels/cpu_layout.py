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


def whole_rows(config: Integers, matrix: MatrixShape) -> bool:
    """Return whether this is int8 with one scale for each output: another kernel, and another layout."""
    return config.bits == 8 and config.group_size in (-1, matrix.inputs)


def encoding_of(config: Integers, matrix: MatrixShape) -> ScaleEncoding:
    """Return the encoding of the scales in the parts."""
    if config.bits != 8:
        return NIBBLES if config.bits == 4 else NIBBLES_OF_3_BITS
    return BYTES if whole_rows(config, matrix) else TWO_NIBBLES


def kernel_group(config: Integers, matrix: MatrixShape) -> int:
    """Return how many inputs share a scale in the parts: the largest group that the kernel knows, or the config's."""
    return torch_int4_group(config.inputs_per_group(matrix.inputs))


def pack(config: Integers, codes: QuantizedMatrix, target: KernelTarget) -> dict[str, torch.Tensor]:
    """Lay codes, uint8 [outputs, inputs], out as the parts that the table above names."""
    matrix = MatrixShape(*codes.codes.shape)
    encoding = encoding_of(config, matrix)
    if whole_rows(config, matrix):
        scales, offsets = (row.t().contiguous() for row in encoding.encode(codes))
        parts = {"packed": (codes.codes ^ 128).view(torch.int8).contiguous(), "scales": scales.to(torch.bfloat16)}
        return {**parts, **({} if config.symmetric else {"offsets": offsets}), **extras(codes)}
    stored = codes.codes * encoding.step
    if config.bits == 8:
        packed = torch.stack([pack_nibbles(half, target.instructions) for half in (stored >> 4, stored & 15)])
    else:
        packed = pack_nibbles(stored, target.instructions)
    if config.bits == 3:
        packed = squeeze(packed, matrix.outputs, matrix.inputs)
    pairs = encoding.encode_pairs(codes, kernel_group(config, matrix))
    return {"packed": packed, "scales": pairs, **extras(codes)}


def unpack(config: Integers, parts: PackedTensors, matrix: MatrixShape, target: KernelTarget) -> QuantizedMatrix:
    """Read the codes, uint8 [outputs, inputs], with scales and zeros, float32 [outputs, groups], from parts."""
    encoding, scales = encoding_of(config, matrix), parts["scales"]
    if whole_rows(config, matrix):
        codes = parts["packed"].view(torch.uint8) ^ 128
        offsets = parts.get("offsets", torch.zeros_like(scales))
    else:
        codes = _stored_codes(config, parts["packed"], matrix, target) // encoding.step
        repeats = config.inputs_per_group(matrix.inputs) // kernel_group(config, matrix)
        scales, offsets = scales[::repeats].unbind(2)
    scales, zeros = encoding.decode(scales, offsets)
    return QuantizedMatrix(codes, scales, zeros, **read_extras(parts))


def required(config: Integers, matrix: MatrixShape) -> Required:
    """Return the shapes and dtypes of the parts that every matrix of this shape has."""
    outputs, inputs = matrix.outputs, matrix.inputs
    if whole_rows(config, matrix):
        return {"packed": ((outputs, inputs), torch.int8), "scales": ((1, outputs), torch.bfloat16)}
    half = outputs * inputs // 2
    packed = {8: (2, half), 4: (half,), 3: (half * 3 // 4,)}[config.bits]
    groups = inputs // kernel_group(config, matrix)
    return {"packed": (packed, torch.uint8), "scales": ((groups, outputs, 2), torch.bfloat16)}


def part_shapes(config: Integers, matrix: MatrixShape, target: KernelTarget) -> PartShapes:
    """Return the shapes and dtypes of all parts."""
    shapes = required(config, matrix)
    if whole_rows(config, matrix) and not config.symmetric:
        return {**shapes, "offsets": ((1, matrix.outputs), torch.float32)}
    return shapes


def zero_shifts(parts: PackedTensors) -> torch.Tensor | None:
    """Return 128 - zero point of each output of int8 of one group, float32 [1, outputs]; None: all are 0."""
    if "offsets" not in parts:
        return None
    scales = parts["scales"].float()
    return torch.where(scales == 0, 0.0, (parts["offsets"] / scales).round_())


def _stored_codes(config: Integers, packed: torch.Tensor, matrix: MatrixShape, target: KernelTarget) -> torch.Tensor:
    """Read the codes as they are stored, times the step of their encoding: uint8 [outputs, inputs]."""
    halves = packed.view(2, -1) if config.bits == 8 else packed.view(1, -1)
    if config.bits == 3:
        halves = unsqueeze(packed, matrix.outputs, matrix.inputs).view(1, -1)
    upper, *lower = [unpack_nibbles(half, matrix.outputs, matrix.inputs, target.instructions) for half in halves]
    return upper << 4 | lower[0] if lower else upper
