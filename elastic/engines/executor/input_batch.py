"""What the executor keeps of sequences between steps, and the inputs of a step that are made of it.

A sequence has a row in tables that live as long as the executor: a step adds to them what is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from elastic.engines.core.step import ScheduledChunk

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

    def part(self, start: int, stop: int) -> BatchTokens:
        """Return some of the sequences."""
        return BatchTokens(self.rows[start:stop], self.starts[start:stop], self.counts[start:stop])


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

    def slots(self, positions: Ints) -> Ints:
        """Return the slots, counted in a row's blocks, of tokens at these positions."""
        return positions if self.window is None else positions % self.window


class InputBatch:
    """The rows of the sequences that the executor knows, and the batch of the present step."""

    def __init__(self, windows: Sequence[int | None], block_tokens: int) -> None:
        self.tables = [BatchBlockTable(block_tokens, window) for window in windows]
        self.rows: dict[str, int] = {}
        """Sequence -> row."""
        self._free: list[int] = []

    def add(self, sequence: str) -> None:
        """Give a sequence a row without blocks."""
        row = self._free.pop() if self._free else len(self.rows)
        self.rows[sequence] = row
        for table in self.tables:
            table.begin(row)

    def remove(self, sequence: str) -> None:
        """Forget a sequence; unknown: nothing happens."""
        row = self.rows.pop(sequence, None)
        if row is not None:
            self._free.append(row)

    def begin_step(self, chunks: Sequence[ScheduledChunk]) -> tuple[BatchTokens, Ints]:
        """Return the tokens of a step: whose they are, and their ids [tokens]. Blocks are added by the caller."""
        rows = self.rows
        batch = BatchTokens(
            np.array([rows[chunk.sequence] for chunk in chunks], np.int64),
            np.array([chunk.start for chunk in chunks], np.int64),
            np.array([len(chunk.tokens) for chunk in chunks], np.int64),
        )
        return batch, np.array(list(chain.from_iterable([chunk.tokens for chunk in chunks])), np.int64)
