"""Which blocks were written since somebody asked, so that a copy of them is brought up to date."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from elastic.engines.executor.kv_copy import changed_blocks

Blocks = tuple[tuple[int, ...], ...]
"""Of each group of layers."""


class DirtyBlockTracker:
    """It hears of a step when that is over, in all of its ranks. Thread-safe."""

    def __init__(self, windows: Sequence[int | None], block_tokens: int, copy: int = 0) -> None:
        """`copy` is the one of the layers whose sequences count."""
        self._windows, self._copy = tuple(windows), copy
        self._block_tokens = block_tokens
        self._blocks: list[set[int]] = [set() for _ in windows]
        self._lock = threading.Lock()  # of the blocks

    def note(self, blocks: Sequence[Sequence[int]], start: int, stop: int, copy: int = 0) -> None:
        """Note that the tokens [start, stop) of a sequence with these blocks, by group, were written in a copy."""
        if copy != self._copy:
            return
        with self._lock:
            for window, table, written in zip(self._windows, blocks, self._blocks, strict=True):
                written.update(table[i] for i in changed_blocks(start, stop, self._block_tokens, window))

    def take(self) -> Blocks:
        """Return the blocks that were written since the last time."""
        with self._lock:
            taken, self._blocks = self._blocks, [set() for _ in self._windows]
        return tuple(tuple(sorted(written)) for written in taken)

    def add(self, blocks: Blocks) -> None:
        """Have blocks be told the next time, as if they were written now: those that hold something, or were taken."""
        with self._lock:
            for written, taken in zip(self._blocks, blocks, strict=True):
                written.update(taken)
