"""Dequantization on a CPU, some columns of the output at a time, into scratch memory: to floats, or to int8."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from elastic.quant.formats.base import PackedTensors
from elastic.quant.kernels.cpu_layout import CpuLayout
from elastic.quant.kernels.int4_layout import ColumnRun, expand, runs, slab_of, slabs
from elastic.quant.kernels.workspace import scratch

PIECE = 2**18
"""Weights in a piece: as float32 they fit a core's cache."""
Piece = tuple[slice, torch.Tensor]
"""Columns of the output, and the tensor that belongs to them."""


def nibbles(layout: CpuLayout, parts: PackedTensors) -> Iterator[Piece]:
    """Yield the nibbles of the matrix, uint8 [planes, bytes], for all columns at once; of int3, slab by slab."""
    packed, bits, outputs, inputs = parts["packed"], layout.config.bits, layout.matrix.outputs, layout.matrix.inputs
    if bits != 3:
        yield slice(0, outputs), packed.view(2 if bits == 8 else 1, -1)
        return
    for start, stop in slabs(outputs, inputs):
        buffer = scratch("nibbles", ((stop - start) * inputs // 2,), torch.uint8)
        yield slice(start, stop), expand(slab_of(packed, start, stop, inputs), buffer).view(1, -1)


def floats(layout: CpuLayout, parts: PackedTensors, dtype: torch.dtype) -> Iterator[Piece]:
    """Yield the weights in a float dtype, [inputs, columns]."""
    for columns, piece in _pieces(layout, parts):
        weights = torch.addcmul(piece.offsets, piece.codes, piece.scales, out=piece.codes)
        yield columns, piece.as_matrix(weights, "floats", dtype)


def bytes_and_steps(layout: CpuLayout, parts: PackedTensors) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield the weights rounded to 255 steps for each output: int8 [inputs, columns], and steps, float32 [columns]."""
    last = (2**layout.config.bits - 1) * layout.encoding.step
    for columns, piece in _pieces(layout, parts):
        ends = torch.maximum(piece.offsets.abs(), (piece.scales * last + piece.offsets).abs())
        steps = ends.amax(2, keepdim=True).clamp_(min=1e-30) / 127
        rounded = torch.addcmul(piece.offsets / steps + 128.5, piece.codes, piece.scales / steps, out=piece.codes)
        weights = piece.as_matrix(rounded, "bytes", torch.uint8)  # the conversion cuts off: with the half, it rounds
        step = torch.empty(columns.stop - columns.start, dtype=torch.float32)
        piece.run.split_nibbles(step, 0).copy_(steps.flatten(2))
        yield columns, weights.bitwise_xor_(128).view(torch.int8), step


@dataclass(frozen=True)
class ColumnCodes:
    """The codes of a run of columns, split as by `ColumnRun.split_nibbles`: weight = code * scale + offset."""

    run: ColumnRun
    codes: torch.Tensor
    """float32 [2, blocks, groups, inputs of a group, width / 2], in scratch memory."""
    scales: torch.Tensor
    """float32 [2, blocks, groups, 1, width / 2]."""
    offsets: torch.Tensor
    """The same shape as the scales."""

    def as_matrix(self, values: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Copy values of the shape of the codes to a [inputs, columns] matrix in the scratch memory of a name."""
        groups, size = self.codes.shape[2:4]
        buffer = scratch(name, (groups, size, self.run.stop - self.run.start), dtype)
        self.run.split_nibbles(buffer, 2).copy_(values)
        return buffer.flatten(0, 1)


def _pieces(layout: CpuLayout, parts: PackedTensors) -> Iterator[tuple[slice, ColumnCodes]]:
    """Yield the codes of about `PIECE` weights at a time, with their columns."""
    encoding, inputs = layout.encoding, layout.matrix.inputs
    for slab, planes in nibbles(layout, parts):
        for run in runs(slab.stop - slab.start, layout.target.instructions):
            pairs = parts["scales"][:, slab.start + run.start : slab.start + run.stop].float()
            scale, offset = pairs.unbind(2)
            both = torch.stack(
                (scale, encoding.exact_offsets(scale, offset) - scale * (encoding.middle * encoding.step))
            )
            split = run.split_nibbles(both, 2).permute(2, 0, 1, 3, 4).unsqueeze(4).contiguous()
            for piece in run.cut(PIECE // inputs):
                blocks = slice((piece.start - run.start) // run.width, (piece.stop - run.start) // run.width)
                codes = torch.unflatten(_read_codes(piece, planes, inputs), 2, (-1, layout.group))
                columns = slice(slab.start + piece.start, slab.start + piece.stop)
                yield columns, ColumnCodes(piece, codes, *split[:, :, blocks])


def _read_codes(run: ColumnRun, planes: torch.Tensor, inputs: int) -> torch.Tensor:
    """Return the codes as they are stored, float32 [2, blocks, inputs, width / 2], in scratch memory."""
    upper, *lower = [run.bytes_of(plane, inputs) for plane in planes]
    codes = scratch("codes", (2, *upper.shape), torch.float32)
    byte = scratch("byte", tuple(upper.shape), torch.uint8)
    if not lower:
        codes[0].copy_(torch.bitwise_and(upper, 15, out=byte))
        codes[1].copy_(torch.bitwise_right_shift(upper, 4, out=byte))
        return codes
    codes[0].copy_(torch.bitwise_left_shift(upper, 4, out=byte).bitwise_or_(lower[0] & 15))
    codes[1].copy_(torch.bitwise_and(upper, 240, out=byte).bitwise_or_(lower[0] >> 4))
    return codes
