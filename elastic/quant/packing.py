"""Where the integers of a matrix lie in memory on a CPU, for each instruction set.

Two codes of 4 bits share a byte. torch's kernel wants the columns of its output in blocks, and within a block all
inputs of a few columns side by side; how, depends on the instructions that it was compiled for:

    AVX512   blocks of 64 columns: byte [k, d] = column d | column d + 32 << 4
    AVX2     blocks of 32 columns: byte [k, d] = column d | column d + 16 << 4
    others   blocks of 32 columns: byte [k, d] = column 2 d | column 2 d + 1 << 4

and so is the last block, if it is narrower, everywhere. Codes of 3 bits are laid out in the same way, which leaves two
bits of each byte free; then the bytes of a block are cut into four equal streams, and the last of them is put into the
free bits of the other three.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Block:
    """Some columns of the output that lie together: rows `start` to `stop` of the matrix."""

    start: int
    stop: int
    halves: bool
    """A byte holds columns of the two halves of the block; otherwise, neighbours."""

    @property
    def width(self) -> int:
        return self.stop - self.start


def blocks(outputs: int, instructions: str) -> Iterator[Block]:
    """The blocks of a packed matrix, in order."""
    width = 64 if instructions == "AVX512" else 32
    for start in range(0, outputs, width):
        stop = min(start + width, outputs)
        yield Block(start, stop, instructions in ("AVX512", "AVX2") and stop - start == width)


def pack_nibbles(codes: torch.Tensor, instructions: str) -> torch.Tensor:
    """Codes of up to 4 bits, uint8 [outputs, inputs], as uint8 [outputs * inputs / 2]."""
    outputs, inputs = codes.shape
    packed = torch.empty(outputs * inputs // 2, dtype=torch.uint8)
    for block in blocks(outputs, instructions):
        columns = codes[block.start : block.stop].t()
        low, high = columns.chunk(2, 1) if block.halves else (columns[:, 0::2], columns[:, 1::2])
        torch.bitwise_or(low, high << 4, out=bytes_of(packed, block, inputs))
    return packed


def unpack_nibbles(packed: torch.Tensor, outputs: int, inputs: int, instructions: str) -> torch.Tensor:
    """What `pack_nibbles` was given."""
    codes = torch.empty(outputs, inputs, dtype=torch.uint8)
    for block in blocks(outputs, instructions):
        both = bytes_of(packed, block, inputs)
        columns = codes[block.start : block.stop].t()
        low, high = columns.chunk(2, 1) if block.halves else (columns[:, 0::2], columns[:, 1::2])
        low.copy_(both & 15)
        high.copy_(both >> 4)
    return codes


def bytes_of(packed: torch.Tensor, block: Block, inputs: int) -> torch.Tensor:
    """The bytes of a block, a view [inputs, width / 2]."""
    start, stop = block.start * inputs // 2, block.stop * inputs // 2
    return packed.view(-1)[start:stop].view(inputs, block.width // 2)


def slabs(outputs: int, inputs: int) -> Iterator[tuple[int, int]]:
    """Columns of the output, start and stop, whose nibbles are about 2 MB, so that they are used while in cache."""
    width = max(2**22 // inputs // 64 * 64, 64)
    for start in range(0, outputs, width):
        yield start, min(start + width, outputs)


def squeeze(packed: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
    """Nibbles whose upper bit is free, uint8 [n], without the free bits, slab by slab, uint8 [3 n / 4]."""
    squeezed = torch.empty(packed.numel() * 3 // 4, dtype=torch.uint8)
    for start, stop in slabs(outputs, inputs):
        streams = packed[start * inputs // 2 : stop * inputs // 2].view(4, -1)
        last = [(streams[3] & mask) << (3 - i) for i, mask in enumerate((0x11, 0x22, 0x44))]
        torch.bitwise_or(streams[:3], torch.stack(last), out=slab_of(squeezed, start, stop, inputs).view(3, -1))
    return squeezed


def slab_of(squeezed: torch.Tensor, start: int, stop: int, inputs: int) -> torch.Tensor:
    """The squeezed bytes of a slab, a view."""
    return squeezed.view(-1)[start * inputs * 3 // 8 : stop * inputs * 3 // 8]


def expand(squeezed: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """The nibbles of a slab from its squeezed bytes, written into `packed`; both start at a multiple of 8 bytes."""
    narrow, wide = squeezed.view(torch.int64).view(3, -1), packed.view(torch.int64).view(4, -1)
    torch.bitwise_and(narrow, 0x7777777777777777, out=wide[:3])
    last = narrow[0].bitwise_right_shift(3).bitwise_and_(0x1111111111111111)
    last.bitwise_or_(narrow[1].bitwise_right_shift(2).bitwise_and_(0x2222222222222222))
    torch.bitwise_or(last, narrow[2].bitwise_right_shift(1).bitwise_and_(0x4444444444444444), out=wide[3])
    return packed


def unsqueeze(squeezed: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
    """All nibbles again, uint8 [outputs * inputs / 2]."""
    packed = torch.empty(outputs * inputs // 2, dtype=torch.uint8)
    for start, stop in slabs(outputs, inputs):
        expand(slab_of(squeezed, start, stop, inputs), packed[start * inputs // 2 : stop * inputs // 2])
    return packed
