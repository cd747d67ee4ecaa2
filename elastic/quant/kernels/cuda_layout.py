"""The parts of a matrix in integers on CUDA. Everything here also runs on tensors in host memory.

    int4   packed  int32 [outputs / 8, inputs / 16 t, 32, t / 2], as torch's int4 kernel wants it, where it takes the
                   shape: t = 8, 4 or 2 tiles of 16 inputs side by side
    else   packed  uint8 [outputs, bytes]: int8, one code a byte; int4, two, the even column in the lower half;
                   int3, the lower two bits of four columns a byte, then the upper bits of eight columns a byte
           scales  bfloat16 [groups, outputs, 2], scale and offset; repeated in groups larger than torch's kernel knows

In a word of torch's layout, thread t of a warp holds output t / 4 of eight, and of 32 inputs those in the nibbles
4 p + i, input 8 i + 2 (t mod 4) + p.
"""

from __future__ import annotations

import torch

from elastic.quant.formats.base import KernelTarget, MatrixShape, PackedTensors
from elastic.quant.formats.integer import Integers, QuantizedMatrix
from elastic.quant.formats.scale_encoding import ScaleEncoding
from elastic.quant.kernels.checks import Required, extras, read_extras

CODINGS = {8: ScaleEncoding(128), 4: ScaleEncoding(8), 3: ScaleEncoding(4)}


def tiled(config: Integers, matrix: MatrixShape) -> bool:
    """Whether torch's int4 kernel takes this matrix."""
    return config.bits == 4 and group_of(config, matrix) in (32, 64, 128, 256)


def group_of(config: Integers, matrix: MatrixShape) -> int:
    """Inputs that share a scale in the parts."""
    size = matrix.inputs if config.group_size == -1 else config.group_size
    known = (256, 128, 64, 32) if config.bits == 4 else ()
    return next((group for group in known if size % group == 0), size)


def required(config: Integers, matrix: MatrixShape) -> Required:
    """The shapes and dtypes of the parts that are always there."""
    outputs, inputs = matrix.outputs, matrix.inputs
    scales = ((inputs // group_of(config, matrix), outputs, 2), torch.bfloat16)
    if tiled(config, matrix):
        tiles = _tiles(inputs)
        return {"packed": ((outputs // 8, inputs // 16 // tiles, 32, tiles // 2), torch.int32), "scales": scales}
    return {"packed": ((outputs, inputs * config.bits // 8), torch.uint8), "scales": scales}


def pack(config: Integers, codes: QuantizedMatrix, target: KernelTarget) -> dict[str, torch.Tensor]:
    matrix = MatrixShape(*codes.codes.shape)
    coding = CODINGS[config.bits]
    pairs = torch.stack((coding.scales(codes), coding.offsets(codes)), 2).transpose(0, 1).to(torch.bfloat16)
    repeats = matrix.inputs // codes.groups // group_of(config, matrix)
    packed = to_tiles(codes.codes) if tiled(config, matrix) else to_rows(codes.codes, config.bits)
    return {"packed": packed, "scales": pairs.repeat_interleave(repeats, 0).contiguous(), **extras(codes)}


def unpack(config: Integers, parts: PackedTensors, matrix: MatrixShape, target: KernelTarget) -> QuantizedMatrix:
    size = matrix.inputs if config.group_size == -1 else config.group_size
    scales, offsets = parts["scales"][:: size // group_of(config, matrix)].unbind(2)
    read, zeros = CODINGS[config.bits].read(scales, offsets)
    codes = codes_of(config, parts["packed"], matrix)
    return QuantizedMatrix(codes, read.t().contiguous(), zeros.t().contiguous(), **read_extras(parts))


def codes_of(config: Integers, packed: torch.Tensor, matrix: MatrixShape) -> torch.Tensor:
    """uint8 [outputs, inputs], of all outputs or of those whose packed bytes are given."""
    return from_tiles(packed, matrix.inputs) if tiled(config, matrix) else from_rows(packed, config.bits)


def to_tiles(codes: torch.Tensor) -> torch.Tensor:
    outputs, inputs = codes.shape
    tiles = _tiles(inputs)
    apart = codes.contiguous().view(outputs // 8, 8, inputs // 16 // tiles, tiles // 2, 4, 4, 2)
    nibbles = apart.permute(0, 2, 1, 5, 3, 6, 4).reshape(outputs // 8, inputs // 16 // tiles, 32, tiles // 2, 4, 2)
    return (nibbles[..., 0] | nibbles[..., 1] << 4).view(torch.int32).squeeze(-1)


def from_tiles(packed: torch.Tensor, inputs: int) -> torch.Tensor:
    eighths, blocks, _, half = packed.shape
    both = packed.unsqueeze(-1).view(torch.uint8)
    nibbles = torch.stack((both & 15, both >> 4), -1).view(eighths, blocks, 8, 4, half, 2, 4)
    return nibbles.permute(0, 2, 1, 4, 6, 3, 5).reshape(eighths * 8, inputs)


def to_rows(codes: torch.Tensor, bits: int) -> torch.Tensor:
    codes = codes.contiguous()
    if bits == 8:
        return codes
    if bits == 4:
        return codes[:, 0::2] | codes[:, 1::2] << 4
    return torch.cat((_gather(codes & 3, 2), _gather(codes >> 2, 1)), 1)


def from_rows(packed: torch.Tensor, bits: int) -> torch.Tensor:
    if bits == 8:
        return packed
    if bits == 4:
        return _scatter(packed, 4)
    lower, upper = torch.tensor_split(packed, (packed.shape[1] // 3 * 2,), 1)
    return _scatter(lower, 2) | _scatter(upper, 1) << 2


def _gather(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Values of so many bits, side by side in bytes, the first one lowest."""
    pieces = [values[:, i :: 8 // bits] << (bits * i) for i in range(8 // bits)]
    return torch.stack(pieces).sum(0, dtype=torch.uint8)


def _scatter(packed: torch.Tensor, bits: int) -> torch.Tensor:
    pieces = [packed >> (bits * i) & (1 << bits) - 1 for i in range(8 // bits)]
    return torch.stack(pieces, 2).flatten(1)


def _tiles(inputs: int) -> int:
    return next(tiles for tiles in (8, 4, 2) if inputs % (16 * tiles) == 0)
