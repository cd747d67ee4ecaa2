"""The keys (or the values) of one decoder layer in virtual memory: a window of pages per row, and tensors over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from elastic.kvcache.storage.layout import StoreGeometry
from elastic.memory.mapped_storage import MappedStorage
from elastic.memory.page_pool import PagePool
from elastic.memory.virtual_range import VirtualRange, map_all, unmap_all


class KVBuffer:
    """Every row shows the same window of slots, [first, stop). Guarded by the lock of its KV pool.

    Tensors share one storage that covers the window and nothing else. When the window moves a new storage takes its
    place; the old one lives on while tensors outside show it, and until then no page is unmapped.
    """

    def __init__(self, pool: PagePool, geometry: StoreGeometry, on_dead: Callable[[], Any]) -> None:
        self.geometry = geometry
        self.first = self.stop = 0
        self._pool = pool
        self._on_dead = on_dead
        self.range = VirtualRange(
            pool, geometry.rows * geometry.row_slots, readable_gaps=bool(geometry.layout.rows_over)
        )
        self._storages: list[MappedStorage] = []  # the last one is current; earlier ones are shown by tensors outside
        self._flat: torch.Tensor | None = None  # [elements of the window, with the gaps between its rows]
        self._flat_offset = 0  # elements of a row before it

    def is_shown_outside(self) -> bool:
        """Drop the tensors that Elastic holds; return whether others still show this memory."""
        self._flat = None
        for storage in self._storages:
            storage.drop()
        self._storages = [storage for storage in self._storages if storage.alive]
        return bool(self._storages)

    def missing(self, start: int, stop: int) -> int:
        """Count the pages to add at the end of the window before the tokens [start, stop) are mapped."""
        first, end = self.geometry.slots(start, stop)
        return self.geometry.rows * max(0, end - (self.stop if self.range.slots else first))

    def spare(self, start: int, stop: int) -> int:
        """Count the mapped pages that hold none of the tokens [start, stop)."""
        first, end = self.geometry.slots(start, stop)
        return len(self.range.slots) - self.geometry.rows * (end - first)

    def extend(self, start: int, stop: int, pages: Sequence[int]) -> None:
        """Map `pages`, as many as `missing` said, at the end of every row; all or none."""
        first, stop = self.geometry.slots(start, stop)
        begin = self.stop if self.range.slots else first
        count, row_slots = stop - begin, self.geometry.row_slots
        map_all(
            (self.range, row * row_slots + begin, pages[row * count : (row + 1) * count])
            for row in range(self.geometry.rows)
        )
        self.first, self.stop = (self.first if self.stop > self.first else first), stop
        self._renew()

    def retreat(self, start: int, stop: int) -> int:
        """Shrink the window to the tokens [start, stop) and free the pages outside it; return how many, all or none.

        Nothing happens while tensors outside show the memory.
        """
        first, stop = self.geometry.slots(start, stop)
        first, stop = max(first, self.first), min(stop, self.stop)
        cuts = [(self.first, first), (stop, self.stop)] if first < stop else [(self.first, self.stop)]
        cuts = [cut for cut in cuts if cut[0] < cut[1]]
        if not cuts or self.is_shown_outside():
            return 0
        row_slots = self.geometry.row_slots
        freed = unmap_all(
            (self.range, row * row_slots + begin, end - begin)
            for row in range(self.geometry.rows)
            for begin, end in cuts
        )
        self.first, self.stop = (first, stop) if first < stop else (0, 0)
        self._pool.free(freed)
        return len(freed)

    def view(self, start: int, stop: int) -> torch.Tensor:
        """View the tokens [start, stop) of the window, [batch, heads, stop - start, dim]."""
        g = self.geometry
        if start == stop:
            with torch.inference_mode(False):
                return torch.empty((g.batch, g.heads, 0, g.dim), dtype=g.dtype, device=self._pool.device)
        if self._flat is None:
            self._renew()
        assert self._flat is not None
        shape, offset = (g.batch, g.heads, stop - start, g.dim), start * g.token_stride - self._flat_offset
        return self._flat.as_strided(shape, g.strides, offset)

    def _renew(self) -> None:
        """Show the window as it is now, by a storage of exactly its size."""
        self.is_shown_outside()
        if self.stop > self.first:
            g = self.geometry
            slots = (g.rows - 1) * g.row_slots + self.stop - self.first
            self._storages.append(self.range.storage(self.first, slots * g.page_bytes, self._on_dead))
            self._flat = self._storages[-1].tensor(g.dtype)
            self._flat_offset = self.first * g.page_bytes // g.dtype.itemsize
