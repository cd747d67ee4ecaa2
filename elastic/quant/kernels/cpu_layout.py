"""The parts of a matrix in integers on a CPU.

    int8 of one group   packed  int8 [outputs, inputs], code - 128
                        scales  bfloat16 [1, outputs]; offsets, the same, unless all zero points are 128
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

from elastic.quant.formats.base import KernelTarget, MatrixShape, PackedTensors
from elastic.quant.formats.integer import Integers, QuantizedMatrix
from elastic.quant.formats.scale_encoding import ScaleEncoding
from elastic.quant.kernels.checks import extras, read_extras
from elastic.quant.kernels.int4_layout import pack_nibbles, squeeze, unpack_nibbles, unsqueeze

BYTES = ScaleEncoding(128)
NIBBLES = ScaleEncoding(8)
NIBBLES_OF_3_BITS = ScaleEncoding(4, step=2)
"""In the upper three bits, so that the kernel's fixed middle, 8, is the middle of the codes."""
TWO_NIBBLES = ScaleEncoding(136, factor=17)
"""code = 16 upper + lower; one pair of scale and offset serves both, for 16 (upper - 8) + (lower - 8) = code - 136."""


def whole_rows(config: Integers, matrix: MatrixShape) -> bool:
    """int8 with one scale for each output: another kernel, and another layout."""
    return config.bits == 8 and config.group_size in (-1, matrix.inputs)


def coding_of(config: Integers, matrix: MatrixShape) -> ScaleEncoding:
    if config.bits != 8:
        return NIBBLES if config.bits == 4 else NIBBLES_OF_3_BITS
    return BYTES if whole_rows(config, matrix) else TWO_NIBBLES


def kernel_group(config: Integers, matrix: MatrixShape) -> int:
    """Inputs that share a scale in the parts: the largest group that the kernel knows, or else the config's own."""
    size = matrix.inputs if config.group_size == -1 else config.group_size
    return next((known for known in (256, 128, 64, 32) if size % known == 0), size)


def pack(config: Integers, codes: QuantizedMatrix, target: KernelTarget) -> dict[str, torch.Tensor]:
    outputs, inputs = codes.codes.shape
    matrix = MatrixShape(outputs, inputs)
    coding = coding_of(config, matrix)
    scales, offsets = coding.scales(codes), coding.offsets(codes)
    if whole_rows(config, matrix):
        parts = {"packed": (codes.codes ^ 128).view(torch.int8).contiguous(), "scales": _rows(scales)}
        return {**parts, **({"offsets": _rows(offsets)} if offsets.any() else {}), **extras(codes)}
    pairs = torch.stack((scales, offsets), 2).transpose(0, 1).to(torch.bfloat16)
    repeats = inputs // codes.groups // kernel_group(config, matrix)
    packed = _nibbles(config, codes.codes * coding.step, target)
    return {"packed": packed, "scales": pairs.repeat_interleave(repeats, 0).contiguous(), **extras(codes)}


def unpack(config: Integers, parts: PackedTensors, matrix: MatrixShape, target: KernelTarget) -> QuantizedMatrix:
    coding, scales = coding_of(config, matrix), parts["scales"]
    if whole_rows(config, matrix):
        codes = parts["packed"].view(torch.uint8) ^ 128
        offsets = parts.get("offsets", torch.zeros_like(scales))
    else:
        codes = _codes(config, parts["packed"], matrix, target) // coding.step
        size = matrix.inputs if config.group_size == -1 else config.group_size
        scales, offsets = scales[:: size // kernel_group(config, matrix)].unbind(2)
    read, zeros = coding.read(scales, offsets)
    return QuantizedMatrix(codes, read.t().contiguous(), zeros.t().contiguous(), **read_extras(parts))


def required(config: Integers, matrix: MatrixShape) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The shapes and dtypes of the parts that are always there."""
    outputs, inputs = matrix.outputs, matrix.inputs
    if whole_rows(config, matrix):
        return {"packed": ((outputs, inputs), torch.int8), "scales": ((1, outputs), torch.bfloat16)}
    half = outputs * inputs // 2
    packed = {8: (2, half), 4: (half,), 3: (half * 3 // 4,)}[config.bits]
    groups = inputs // kernel_group(config, matrix)
    return {"packed": (packed, torch.uint8), "scales": ((groups, outputs, 2), torch.bfloat16)}


def _rows(values: torch.Tensor) -> torch.Tensor:
    return values.t().to(torch.bfloat16).contiguous()


def _nibbles(config: Integers, codes: torch.Tensor, target: KernelTarget) -> torch.Tensor:
    if config.bits == 8:
        return torch.stack([pack_nibbles(half, target.instructions) for half in (codes >> 4, codes & 15)])
    packed = pack_nibbles(codes, target.instructions)
    return squeeze(packed, *codes.shape) if config.bits == 3 else packed


def _codes(config: Integers, packed: torch.Tensor, matrix: MatrixShape, target: KernelTarget) -> torch.Tensor:
    halves = packed.view(2, -1) if config.bits == 8 else packed.view(1, -1)
    if config.bits == 3:
        halves = unsqueeze(packed, matrix.outputs, matrix.inputs).view(1, -1)
    upper, *lower = [unpack_nibbles(half, matrix.outputs, matrix.inputs, target.instructions) for half in halves]
    return upper << 4 | lower[0] if lower else upper
