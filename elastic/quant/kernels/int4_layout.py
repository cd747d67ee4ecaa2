"""Where the integers of a matrix lie in memory on a CPU, for each instruction set.

Two codes of 4 bits share a byte. torch's kernel wants the columns of its output in blocks, and within a block all
inputs of a few columns side by side; how, depends on the instructions that it was compiled for:

    AVX512   blocks of 64 columns: byte [k, d] = column d | column d + 32 << 4
    AVX2     blocks of 32 columns: byte [k, d] = column d | column d + 16 << 4
    others   blocks of 32 columns: byte [k, d] = column 2 d | column 2 d + 1 << 4

and so is the last block, if it is narrower, everywhere. Codes of 3 bits are laid out in the same way, in the upper bits
of a nibble, which leaves two bits of each byte free. The bytes of some columns are cut into four equal streams, and the
last of them is put into the free bits of the other three.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from elastic.quant.kernels.workspace import scratch

_FREE = 0x1111111111111111
_CODES = -1 - _FREE


@dataclass(frozen=True)
class ColumnRun:
    """Blocks of the same kind side by side: columns `start` to `stop` of the output."""

    start: int
    stop: int
    width: int
    """Columns of a block."""
    halves: bool
    """A byte holds columns from the two halves of the block; otherwise, neighbours."""

    def apart(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """A view of a tensor that has the columns of this run in dimension `dim`, as [2, blocks, ..., width / 2].

        First the columns in low nibbles, then those in high ones.
        """
        half = self.width // 2
        split = torch.unflatten(tensor, dim, (-1, 2, half) if self.halves else (-1, half, 2))
        nibble, column = (dim + 1, dim + 2) if self.halves else (dim + 2, dim + 1)
        others = [d for d in range(split.dim()) if d not in (dim, nibble, column)]
        return split.permute(nibble, dim, *others, column)

    def bytes_of(self, packed: torch.Tensor, inputs: int) -> torch.Tensor:
        """The bytes of these columns, a view [blocks, inputs, width / 2]."""
        return packed[self.start * inputs // 2 : self.stop * inputs // 2].view(-1, inputs, self.width // 2)

    def cut(self, columns: int) -> Iterator[ColumnRun]:
        """Shorter runs, of about so many columns."""
        step = max(columns // self.width, 1) * self.width
        for start in range(self.start, self.stop, step):
            yield replace(self, start=start, stop=min(start + step, self.stop))


def runs(outputs: int, instructions: str) -> Iterator[ColumnRun]:
    """A packed matrix in order: its blocks, then the narrower one that is left."""
    width = 64 if instructions == "AVX512" else 32
    full = outputs // width * width
    if full:
        yield ColumnRun(0, full, width, instructions in ("AVX512", "AVX2"))
    if full < outputs:
        yield ColumnRun(full, outputs, outputs - full, False)


def pack_nibbles(codes: torch.Tensor, instructions: str) -> torch.Tensor:
    """Codes of up to 4 bits, uint8 [outputs, inputs], as uint8 [outputs * inputs / 2]."""
    outputs, inputs = codes.shape
    packed = torch.empty(outputs * inputs // 2, dtype=torch.uint8)
    for run in runs(outputs, instructions):
        low, high = run.apart(codes[run.start : run.stop], 0)
        torch.bitwise_or(low, high << 4, out=run.bytes_of(packed, inputs))
    return packed


def unpack_nibbles(packed: torch.Tensor, outputs: int, inputs: int, instructions: str) -> torch.Tensor:
    """What `pack_nibbles` was given."""
    codes = torch.empty(outputs, inputs, dtype=torch.uint8)
    for run in runs(outputs, instructions):
        low, high = run.apart(codes[run.start : run.stop], 0)
        both = run.bytes_of(packed, inputs)
        low.copy_(both & 15)
        high.copy_(both >> 4)
    return codes


@functools.cache
def kernel_agrees(instructions: str) -> bool:
    """Whether torch's own packer, here and now, lays nibbles out as described above for these instructions."""
    codes = torch.arange(80 * 32, dtype=torch.int32).view(80, 32) * 7 % 16
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    return torch.equal(packed.view(-1), pack_nibbles(codes.to(torch.uint8), instructions))


SLAB = 2**22
"""Weights expanded at a time: their nibbles stay in the cache until they are used."""


def slabs(outputs: int, inputs: int) -> Iterator[tuple[int, int]]:
    """Columns of the output, start and stop, in slabs of about so many weights; part of the layout."""
    width = max(SLAB // inputs // 64 * 64, 64)
    for start in range(0, outputs, width):
        yield start, min(start + width, outputs)


def squeeze(packed: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
    """Nibbles whose lowest bit is free, uint8 [n], without the free bits, slab by slab, uint8 [3 n / 4]."""
    squeezed = torch.empty(packed.numel() * 3 // 4, dtype=torch.uint8)
    for start, stop in slabs(outputs, inputs):
        streams = packed[start * inputs // 2 : stop * inputs // 2].view(4, -1)
        last = [streams[3] >> (i + 1) & 0x11 for i in range(3)]
        torch.bitwise_or(streams[:3], torch.stack(last), out=slab_of(squeezed, start, stop, inputs).view(3, -1))
    return squeezed


def slab_of(squeezed: torch.Tensor, start: int, stop: int, inputs: int) -> torch.Tensor:
    """The squeezed bytes of a slab, a view."""
    return squeezed.view(-1)[start * inputs * 3 // 8 : stop * inputs * 3 // 8]


def expand(squeezed: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """The nibbles of a slab from its squeezed bytes, written into `packed`; both start at a multiple of 8 bytes."""
    narrow, wide = squeezed.view(torch.int64).view(3, -1), packed.view(torch.int64).view(4, -1)
    last, bits = wide[3], scratch("bits", (wide.shape[1],), torch.int64)
    torch.bitwise_and(narrow[2], _FREE, out=last)
    torch.add(torch.bitwise_and(narrow[1], _FREE, out=bits), last, alpha=2, out=last)
    torch.add(torch.bitwise_and(narrow[0], _FREE, out=bits), last, alpha=2, out=last).bitwise_left_shift_(1)
    torch.bitwise_and(narrow, _CODES, out=wide[:3])
    return packed


def unsqueeze(squeezed: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
    """All nibbles again, uint8 [outputs * inputs / 2]."""
    packed = torch.empty(outputs * inputs // 2, dtype=torch.uint8)
    for start, stop in slabs(outputs, inputs):
        expand(slab_of(squeezed, start, stop, inputs), packed[start * inputs // 2 : stop * inputs // 2])
    return packed
