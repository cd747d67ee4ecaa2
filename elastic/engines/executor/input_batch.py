"""The tokens of a step, and the tables of blocks that live as long as the executor: a sequence has a row in each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class BatchTokens:
    """The new tokens of some sequences of a step, after one another."""

    rows: Ints
    """[sequences]: their rows in the tables."""
    starts: Ints
    """[sequences]: tokens that their blocks hold before."""
    counts: Ints
    """[sequences]: new tokens."""

    @cached_property
    def first(self) -> Ints:
        """Where in the batch the tokens of each begin, [sequences]."""
        return np.cumsum(self.counts) - self.counts

    @cached_property
    def only_single(self) -> bool:
        """Whether every sequence has one new token."""
        return int(self.counts.max()) == 1

    @cached_property
    def positions(self) -> Ints:
        """The positions of the tokens in their texts, [tokens]."""
        if self.only_single:
            return self.starts
        return np.arange(int(self.counts.sum())) + np.repeat(self.starts - self.first, self.counts)


class BatchBlockTable:
    """The physical blocks of every row, for the layers of one group."""

    def __init__(self, block_tokens: int, window: int | None) -> None:
        self.block_tokens = block_tokens
        self.window = window
        self.blocks: Ints = np.zeros((16, 16), np.int64)
        """[rows, blocks]; beyond `counts` of no meaning."""
        self.counts: Ints = np.zeros(16, np.int64)
        """[rows]"""
        self.version = 0
        """Counts the changes of what it says."""

    def begin(self, row: int) -> None:
        """Have a row hold no block."""
        if row >= len(self.counts):
            self.blocks = np.concatenate([self.blocks, np.zeros_like(self.blocks)])
            self.counts = np.concatenate([self.counts, np.zeros_like(self.counts)])
        self.counts[row] = 0

    def extend(self, row: int, blocks: Ints) -> None:
        """Add blocks at the end of a row."""
        held = int(self.counts[row])
        stop = held + len(blocks)
        while stop > self.blocks.shape[1]:
            self.blocks = np.concatenate([self.blocks, np.zeros_like(self.blocks)], 1)
        self.blocks[row, held:stop] = blocks
        self.counts[row] = stop
        self.version += 1

    def renumber(self, moves: Mapping[int, int]) -> None:
        """Have blocks be others, in all rows."""
        before = np.array(sorted(moves), np.int64)
        after = np.array([moves[block] for block in sorted(moves)], np.int64)
        at = np.searchsorted(before, self.blocks).clip(max=len(before) - 1)
        self.blocks = np.where(before[at] == self.blocks, after[at], self.blocks)
        self.version += 1

    def slots(self, positions: Ints) -> Ints:
        """Return the slots, counted in a row's blocks, of tokens at these positions."""
        return positions if self.window is None else positions % self.window
