"""Pieces of a matrix in nibbles, some columns of the output at a time, in scratch memory: as floats, or as int8."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from elastic.quant.formats.base import KernelTarget, MatrixShape, PackedTensors
from elastic.quant.formats.integer import Integers
from elastic.quant.kernels.cpu_layout import coding_of, kernel_group
from elastic.quant.kernels.int4_layout import ColumnRun, expand, runs, slab_of, slabs
from elastic.quant.kernels.workspace import scratch

PIECE = 2**18
"""Weights in a piece: as float32 they fit a core's cache."""
Piece = tuple[slice, torch.Tensor]
"""Columns of the output, and what belongs to them."""


def nibbles(config: Integers, parts: PackedTensors, matrix: MatrixShape) -> Iterator[Piece]:
    """The nibbles of the matrix, uint8 [planes, bytes]: all at once, but for int3."""
    packed = parts["packed"]
    if config.bits != 3:
        yield slice(0, matrix.outputs), packed.view(2 if config.bits == 8 else 1, -1)
        return
    for start, stop in slabs(matrix.outputs, matrix.inputs):
        room = scratch("nibbles", ((stop - start) * matrix.inputs // 2,), torch.uint8)
        yield slice(start, stop), expand(slab_of(packed, start, stop, matrix.inputs), room).view(1, -1)


@dataclass(frozen=True)
class ColumnCodes:
    """The codes of a run of columns: weight = code * scale + offset. They start with the dimension of `Run.apart`."""

    run: ColumnRun
    codes: torch.Tensor
    """float32 [2, blocks, groups, inputs of a group, width / 2]."""
    scales: torch.Tensor
    """float32 [2, blocks, groups, 1, width / 2]."""
    offsets: torch.Tensor

    def scaled(self) -> torch.Tensor:
        """The weights, in place of the codes."""
        return torch.addcmul(self.offsets, self.codes, self.scales, out=self.codes)

    def as_matrix(self, values: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
        """What is shaped like the codes, as [inputs, columns] in scratch memory."""
        groups, size = self.codes.shape[2:4]
        room = scratch(name, (groups, size, self.run.stop - self.run.start), dtype)
        self.run.apart(room, 2).copy_(values)
        return room.flatten(0, 1)


def floats(
    config: Integers, parts: PackedTensors, matrix: MatrixShape, target: KernelTarget, dtype: torch.dtype
) -> Iterator[Piece]:
    """The weights, [inputs, columns]."""
    for columns, codes in _codes(config, parts, matrix, target):
        yield columns, codes.as_matrix(codes.scaled(), "floats", dtype)


def bytes_and_steps(
    config: Integers, parts: PackedTensors, matrix: MatrixShape, target: KernelTarget
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """The weights rounded to 255 steps for each output: int8 [inputs, columns], and the steps, float32 [columns]."""
    last = (2**config.bits - 1) * coding_of(config, matrix).step
    for columns, codes in _codes(config, parts, matrix, target):
        ends = torch.maximum(codes.offsets.abs(), (codes.scales * last + codes.offsets).abs())
        steps = ends.amax(2, keepdim=True).clamp_(min=1e-30) / 127
        rounded = torch.addcmul(codes.offsets / steps + 128.5, codes.codes, codes.scales / steps, out=codes.codes)
        matrix_ = codes.as_matrix(rounded, "bytes", torch.uint8)  # the conversion cuts off: with the half, it rounds
        step = torch.empty(columns.stop - columns.start)
        codes.run.apart(step, 0).copy_(steps.flatten(2))
        yield columns, matrix_.bitwise_xor_(128).view(torch.int8), step


def _codes(
    config: Integers, parts: PackedTensors, matrix: MatrixShape, target: KernelTarget
) -> Iterator[tuple[slice, ColumnCodes]]:
    size = kernel_group(config, matrix)
    for span, planes in nibbles(config, parts, matrix):
        for whole in runs(span.stop - span.start, target.instructions):
            scales, offsets = _scales(config, matrix, whole, parts["scales"][:, span])
            for run in whole.cut(PIECE // matrix.inputs):
                blocks = slice((run.start - whole.start) // run.width, (run.stop - whole.start) // run.width)
                codes = torch.unflatten(_expanded(run, planes, matrix.inputs), 2, (-1, size))
                columns = ColumnCodes(run, codes, scales[:, blocks], offsets[:, blocks])
                yield slice(span.start + run.start, span.start + run.stop), columns


def _expanded(run: ColumnRun, planes: torch.Tensor, inputs: int) -> torch.Tensor:
    """float32 [2, blocks, inputs, width / 2], the codes as they are."""
    upper, *lower = [run.bytes_of(plane, inputs) for plane in planes]
    floats = scratch("codes", (2, *upper.shape), torch.float32)
    byte = scratch("byte", tuple(upper.shape), torch.uint8)
    if not lower:
        floats[0].copy_(torch.bitwise_and(upper, 15, out=byte))
        floats[1].copy_(torch.bitwise_right_shift(upper, 4, out=byte))
        return floats
    floats[0].copy_(torch.bitwise_left_shift(upper, 4, out=byte).bitwise_or_(lower[0] & 15))
    floats[1].copy_(torch.bitwise_and(upper, 240, out=byte).bitwise_or_(lower[0] >> 4))
    return floats


def _scales(config: Integers, matrix: MatrixShape, run: ColumnRun, scales: torch.Tensor) -> torch.Tensor:
    """Scale and offset for codes as they are, float32 [2 of them, 2, blocks, groups, 1, width / 2]."""
    coding = coding_of(config, matrix)
    scale, offset = scales[:, run.start : run.stop].float().unbind(2)
    both = torch.stack((scale, offset * coding.factor - scale * (coding.middle * coding.step)))
    return run.apart(both, 2).permute(2, 0, 1, 3, 4).unsqueeze(4).contiguous()
