"""Which blocks were written since somebody asked, so that a copy of them is brought up to date, and in what sectors."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from elastic.engines.core.kv_state import LayersKV
from elastic.engines.executor.kv_copy import changed_blocks
from elastic.engines.pipeline.items import SectorRef
from elastic.errors import StateError
from elastic.kvcache.storage.sector_space import SectorSpace

Blocks = tuple[tuple[int, ...], ...]
"""Of each group of layers."""


class DirtyBlockTracker:
    """It hears of a step when that is over, in all of its ranks. Thread-safe."""

    def __init__(
        self, windows: Sequence[int | None], block_tokens: int, copy: int = 0, memory: SectorSpace | None = None
    ) -> None:
        """`copy` is the one of the layers whose sequences count; the blocks are of `memory`, if it is given."""
        self._windows, self._copy, self._memory = tuple(windows), copy, memory
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
        """Return the blocks that were written since the last time, but for those that went with their sectors."""
        with self._lock:
            taken, self._blocks = self._blocks, [set() for _ in self._windows]
        blocks = tuple(tuple(sorted(written)) for written in taken)
        return blocks if self._memory is None else _in_sectors(self._memory, blocks)

    def add(self, blocks: Blocks) -> None:
        """Have blocks be told the next time, as if they were written now: those that hold something, or were taken."""
        with self._lock:
            for written, taken in zip(self._blocks, blocks, strict=True):
                written.update(taken)


def _in_sectors(memory: SectorSpace, blocks: Blocks) -> Blocks:
    """Return those of blocks whose sectors are mapped."""
    with memory.lock:
        mapped = set(memory.mapped_sectors)
    sizes = [memory.blocks_per_sector(group) for group in range(len(blocks))]
    return tuple(tuple(b for b in group if (g, b // sizes[g]) in mapped) for g, group in enumerate(blocks))


def sectors_of(memory: SectorSpace, blocks: Blocks) -> list[SectorRef]:
    """List the sectors that blocks, by group, are in."""
    sizes = [memory.blocks_per_sector(group) for group in range(len(blocks))]
    return list(dict.fromkeys(SectorRef(g, b // sizes[g]) for g, group in enumerate(blocks) for b in group))


def require_known_sectors(source: LayersKV, memory: SectorSpace, blocks: Blocks) -> None:
    """Raise `StateError` where blocks are in sectors of which a source does not say where they are."""
    if unknown := unknown_sector(source, memory, sectors_of(memory, blocks)):
        layer, sector = unknown
        raise StateError(f"the source does not know sector {sector} of layer {layer}; ask for it anew")


def unknown_sector(source: LayersKV, memory: SectorSpace, sectors: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
    """Return a layer and a sector, of these (group, sector), of which a source does not say where it is; None: all."""
    for group, sector in sectors:
        for layer in memory.groups[group].group.layers:
            if layer in source.pages and sector not in source.pages[layer]:
                return layer, sector
    return None
