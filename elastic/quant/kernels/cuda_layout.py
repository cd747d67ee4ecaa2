"""The layout of a matrix in integers on CUDA: its parts. All functions also run on tensors in host memory.

    int4   packed  int32 [outputs / 8, inputs / 16 t, 32, t / 2], as torch's int4 kernel wants it, where it takes the
                   shape, from sm80 on: t = 8, 4 or 2 tiles of 16 inputs side by side
    else   packed  uint8 [outputs, bytes]: int8, one code a byte; int4, two, the even column in the lower half;
                   int3, the lower two bits of four columns a byte, then the upper bits of eight columns a byte
           scales  bfloat16 [groups, outputs, 2], scale and offset; repeated in groups larger than torch's kernel knows

In a word of torch's layout, thread t of a warp holds output t / 4 of eight, and of 32 inputs those in the nibbles
4 p + i, input 8 i + 2 (t mod 4) + p.
"""

from __future__ import annotations

import torch

from elastic.quant.formats.base import KernelTarget, MatrixShape, PackedTensors, PartShapes
from elastic.quant.formats.integer import Integers, QuantizedMatrix
from elastic.quant.formats.scale_encoding import ScaleEncoding
from elastic.quant.kernels.checks import extras, read_extras, torch_int4_group

ENCODINGS = {8: ScaleEncoding(128), 4: ScaleEncoding(8), 3: ScaleEncoding(4)}


class CudaLayout:
    """How a matrix of one shape lies for one GPU: what the table above says of it."""

    def __init__(self, config: Integers, matrix: MatrixShape, target: KernelTarget) -> None:
        self.config, self.matrix, self.target = config, matrix, target
        size = config.inputs_per_group(matrix.inputs)
        self.group = torch_int4_group(size) if config.bits == 4 else size
        """How many inputs share a scale in the parts."""
        has_body = target.compute_capability >= 80  # compiled for a GPU before, torch's kernel has none
        self.tiled = config.bits == 4 and self.group in (32, 64, 128, 256) and has_body
        """Whether torch's int4 kernel takes this matrix."""
        self.encoding = ENCODINGS[config.bits]
        """Of the scales in the parts."""
        self.part_shapes = self._part_shapes()
        """Shapes and dtypes of the parts, but for those that codes may have besides."""

    def _part_shapes(self) -> PartShapes:
        outputs, inputs = self.matrix.outputs, self.matrix.inputs
        scales = ((inputs // self.group, outputs, 2), torch.bfloat16)
        if self.tiled:
            tiles = _tiles(inputs)
            return {"packed": ((outputs // 8, inputs // 16 // tiles, 32, tiles // 2), torch.int32), "scales": scales}
        return {"packed": ((outputs, inputs * self.config.bits // 8), torch.uint8), "scales": scales}

    def pack(self, codes: QuantizedMatrix) -> dict[str, torch.Tensor]:
        """Lay codes, uint8 [outputs, inputs], out as the parts that the table above names."""
        pairs = self.encoding.encode_pairs(codes, self.group)
        packed = to_tiles(codes.codes) if self.tiled else to_rows(codes.codes, self.config.bits)
        return {"packed": packed, "scales": pairs, **extras(codes)}

    def unpack(self, parts: PackedTensors) -> QuantizedMatrix:
        """Read the codes, uint8 [outputs, inputs], with scales and zeros, float32 [outputs, groups], from parts."""
        repeats = self.config.inputs_per_group(self.matrix.inputs) // self.group
        scales, offsets = parts["scales"][::repeats].unbind(2)
        scales, zeros = self.encoding.decode(scales, offsets)
        return QuantizedMatrix(self.codes_of(parts["packed"]), scales, zeros, **read_extras(parts))

    def codes_of(self, packed: torch.Tensor) -> torch.Tensor:
        """Read codes, uint8 [rows, inputs], from the packed bytes of some outputs, [rows / 8, ...] or [rows, n]."""
        return from_tiles(packed, self.matrix.inputs) if self.tiled else from_rows(packed, self.config.bits)


def to_tiles(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes of 4 bits, uint8 [outputs, inputs], into int32 [outputs / 8, inputs / 16 t, 32, t / 2]."""
    outputs, inputs = codes.shape
    tiles = _tiles(inputs)
    split = codes.contiguous().view(outputs // 8, 8, inputs // 16 // tiles, tiles // 2, 4, 4, 2)
    nibbles = split.permute(0, 2, 1, 5, 3, 6, 4).reshape(outputs // 8, inputs // 16 // tiles, 32, tiles // 2, 4, 2)
    return (nibbles[..., 0] | nibbles[..., 1] << 4).view(torch.int32).squeeze(-1)


def from_tiles(packed: torch.Tensor, inputs: int) -> torch.Tensor:
    """Undo `to_tiles`: int32 [outputs / 8, inputs / 16 t, 32, t / 2] -> uint8 [outputs, inputs]."""
    eighths, blocks, _, half = packed.shape
    both = packed.unsqueeze(-1).view(torch.uint8)
    nibbles = torch.stack((both & 15, both >> 4), -1).view(eighths, blocks, 8, 4, half, 2, 4)
    return nibbles.permute(0, 2, 1, 4, 6, 3, 5).reshape(eighths * 8, inputs)


def to_rows(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes, uint8 [outputs, inputs], row by row into uint8 [outputs, inputs * bits / 8]."""
    codes = codes.contiguous()
    if bits == 8:
        return codes
    if bits == 4:
        return codes[:, 0::2] | codes[:, 1::2] << 4
    return torch.cat((_gather(codes & 3, 2), _gather(codes >> 2, 1)), 1)


def from_rows(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Undo `to_rows`: uint8 [outputs, inputs * bits / 8] -> uint8 [outputs, inputs]."""
    if bits == 8:
        return packed
    if bits == 4:
        return _scatter(packed, 4)
    lower, upper = torch.tensor_split(packed, (packed.shape[1] // 3 * 2,), 1)
    return _scatter(lower, 2) | _scatter(upper, 1) << 2


def _gather(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Put values of so many bits side by side into bytes, the first one lowest: uint8 [n, k] -> [n, k * bits / 8]."""
    pieces = [values[:, i :: 8 // bits] << (bits * i) for i in range(8 // bits)]
    return torch.stack(pieces).sum(0, dtype=torch.uint8)


def _scatter(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Undo `_gather`: uint8 [n, k * bits / 8] -> [n, k]."""
    pieces = [packed >> (bits * i) & (1 << bits) - 1 for i in range(8 // bits)]
    return torch.stack(pieces, 2).flatten(1)


def _tiles(inputs: int) -> int:
    """Return how many tiles of 16 inputs lie side by side in torch's layout."""
    return next(tiles for tiles in (8, 4, 2) if inputs % (16 * tiles) == 0)
