"""Unpacking of small integers from the words of quantized checkpoints, to one byte each."""

from __future__ import annotations

import math

import torch

_AWQ_COLUMNS = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
"""Column of a word -> the nibble that holds it, counted from the lowest."""


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack int32 [rows, words] to uint8 [rows, words * 32 / bits].

    A row is one stream of bits, lowest bit of the lowest word first (GPTQ): codes of 3 bits straddle words.
    """
    unit = math.lcm(bits, 8) // 8
    stream = words.contiguous().view(torch.uint8).view(len(words), -1, unit)
    units = stream[..., 0]
    if unit > 1:
        units = units.int()
        for i in range(1, unit):
            units |= stream[..., i].int() << (8 * i)
    codes = torch.empty((*units.shape, 8 * unit // bits), dtype=torch.uint8)
    for i in range(codes.shape[-1]):
        codes[..., i] = (units >> (bits * i)) & (2**bits - 1)
    return codes.view(len(words), -1)


def unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """Unpack int32 [rows, words] to uint8 [rows, words * 8]: 4 bits each, the columns of a word interleaved (AWQ)."""
    nibbles = unpack(words, 4).view(len(words), -1, 8)
    return nibbles.index_select(2, _AWQ_COLUMNS).view(len(words), -1)
