"""The order of 4-bit codes in memory on a CPU, for each instruction set.

Two codes of 4 bits share a byte. torch's kernel wants the columns of its output in blocks, and within a block all
inputs of a few columns side by side; how, depends on the instructions that it was compiled for:

    AVX512   blocks of 64 columns: byte [k, d] = column d | column d + 32 << 4
    AVX2     blocks of 32 columns: byte [k, d] = column d | column d + 16 << 4
    others   blocks of 32 columns: byte [k, d] = column 2 d | column 2 d + 1 << 4

A narrower last block is laid out as under "others" for all instructions. Codes of 3 bits are laid out in the same way,
in the upper bits of a nibble, which leaves two bits of each byte free. The bytes of some columns are cut into four
equal streams, and the last of them is put into the free bits of the other three.
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

    def split_nibbles(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """View a tensor with the columns of this run in dimension `dim` as [2, blocks, ..., width / 2].

        The first of the two are the columns in low nibbles, then those in high ones. Any dtype.
        """
        half = self.width // 2
        split = torch.unflatten(tensor, dim, (-1, 2, half) if self.halves else (-1, half, 2))
        nibble, column = (dim + 1, dim + 2) if self.halves else (dim + 2, dim + 1)
        others = [d for d in range(split.dim()) if d not in (dim, nibble, column)]
        return split.permute(nibble, dim, *others, column)

    def bytes_of(self, packed: torch.Tensor, inputs: int) -> torch.Tensor:
        """View the bytes of these columns in a packed matrix, uint8 [n], as [blocks, inputs, width / 2]."""
        return packed[self.start * inputs // 2 : self.stop * inputs // 2].view(-1, inputs, self.width // 2)

    def cut(self, columns: int) -> Iterator[ColumnRun]:
        """Divide the run into shorter ones of about so many columns."""
        step = max(columns // self.width, 1) * self.width
        for start in range(self.start, self.stop, step):
            yield replace(self, start=start, stop=min(start + step, self.stop))


def runs(outputs: int, instructions: str) -> Iterator[ColumnRun]:
    """Yield the blocks of a packed matrix in order, all of one width as one run, then the narrower last one."""
    width = 64 if instructions == "AVX512" else 32
    full = outputs // width * width
    if full:
        yield ColumnRun(0, full, width, instructions in ("AVX512", "AVX2"))
    if full < outputs:
        yield ColumnRun(full, outputs, outputs - full, False)


def pack_nibbles(codes: torch.Tensor, instructions: str) -> torch.Tensor:
    """Pack codes of up to 4 bits, uint8 [outputs, inputs], into uint8 [outputs * inputs / 2]."""
    outputs, inputs = codes.shape
    packed = torch.empty(outputs * inputs // 2, dtype=torch.uint8)
    for run in runs(outputs, instructions):
        low, high = run.split_nibbles(codes[run.start : run.stop], 0)
        torch.bitwise_or(low, high << 4, out=run.bytes_of(packed, inputs))
    return packed


def unpack_nibbles(packed: torch.Tensor, outputs: int, inputs: int, instructions: str) -> torch.Tensor:
    """Undo `pack_nibbles`: uint8 [outputs * inputs / 2] -> uint8 [outputs, inputs]."""
    codes = torch.empty(outputs, inputs, dtype=torch.uint8)
    for run in runs(outputs, instructions):
        low, high = run.split_nibbles(codes[run.start : run.stop], 0)
        both = run.bytes_of(packed, inputs)
        low.copy_(both & 15)
        high.copy_(both >> 4)
    return codes


@functools.cache
def kernel_agrees(instructions: str) -> bool:
    """Return whether torch's packer in this process lays nibbles out as described above for these instructions."""
    codes = torch.arange(80 * 32, dtype=torch.int32).view(80, 32) * 7 % 16
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    return torch.equal(packed.view(-1), pack_nibbles(codes.to(torch.uint8), instructions))


SLAB = 2**22
"""Weights expanded at a time: their nibbles stay in the cache until they are used."""


def slabs(outputs: int, inputs: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of slabs, columns of the output with about `SLAB` weights; they are part of the layout."""
    width = max(SLAB // inputs // 64 * 64, 64)
    for start in range(0, outputs, width):
        yield start, min(start + width, outputs)


def squeeze(packed: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
    """Take the free lowest bits out of nibbles, slab by slab: uint8 [n] -> uint8 [3 n / 4]."""
    squeezed = torch.empty(packed.numel() * 3 // 4, dtype=torch.uint8)
    for start, stop in slabs(outputs, inputs):
        streams = packed[start * inputs // 2 : stop * inputs // 2].view(4, -1)
        last = [streams[3] >> (i + 1) & 0x11 for i in range(3)]
        torch.bitwise_or(streams[:3], torch.stack(last), out=slab_of(squeezed, start, stop, inputs).view(3, -1))
    return squeezed


def slab_of(squeezed: torch.Tensor, start: int, stop: int, inputs: int) -> torch.Tensor:
    """View the bytes of a slab in a squeezed matrix, uint8 [outputs * inputs * 3 / 8], as [n]."""
    return squeezed.view(-1)[start * inputs * 3 // 8 : stop * inputs * 3 // 8]


def expand(squeezed: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Write the nibbles of a slab into `packed`, uint8 [n], from its squeezed bytes, uint8 [3 n / 4]; return `packed`.

    Both start at a multiple of 8 bytes.
    """
    narrow, wide = squeezed.view(torch.int64).view(3, -1), packed.view(torch.int64).view(4, -1)
    last, bits = wide[3], scratch("bits", (wide.shape[1],), torch.int64)
    torch.bitwise_and(narrow[2], _FREE, out=last)
    torch.add(torch.bitwise_and(narrow[1], _FREE, out=bits), last, alpha=2, out=last)
    torch.add(torch.bitwise_and(narrow[0], _FREE, out=bits), last, alpha=2, out=last).bitwise_left_shift_(1)
    torch.bitwise_and(narrow, _CODES, out=wide[:3])
    return packed


def unsqueeze(squeezed: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
    """Undo `squeeze` for all slabs: uint8 [outputs * inputs * 3 / 8] -> uint8 [outputs * inputs / 2]."""
    packed = torch.empty(outputs * inputs // 2, dtype=torch.uint8)
    for start, stop in slabs(outputs, inputs):
        expand(slab_of(squeezed, start, stop, inputs), packed[start * inputs // 2 : stop * inputs // 2])
    return packed
