"""Which blocks were written since somebody asked, so that a copy of them is brought up to date."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.engines.executor.kv_copy import changed_blocks

Blocks = tuple[tuple[int, ...], ...]
"""Of each group of layers."""


class WrittenBlocks:
    """For the thread of an engine's loop. It hears of a step when that is over, in all of its ranks."""

    def __init__(self, windows: Sequence[int | None], block_tokens: int) -> None:
        self._windows = tuple(windows)
        self._block_tokens = block_tokens
        self._blocks: list[set[int]] = [set() for _ in windows]

    def note(self, blocks: Sequence[Sequence[int]], start: int, stop: int) -> None:
        """Note that the tokens [start, stop) of a sequence with these blocks, by group, were written."""
        for window, table, written in zip(self._windows, blocks, self._blocks, strict=True):
            written.update(table[i] for i in changed_blocks(start, stop, self._block_tokens, window))

    def take(self) -> Blocks:
        """Return the blocks that were written since the last time."""
        taken = tuple(tuple(sorted(written)) for written in self._blocks)
        for written in self._blocks:
            written.clear()
        return taken

    def put_back(self, blocks: Blocks) -> None:
        """Undo `take`."""
        for written, taken in zip(self._blocks, blocks, strict=True):
            written.update(taken)
