"""The keys (or the values) of one decoder layer in virtual memory: a window of pages per row, and tensors over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from elastic.kvcache.storage.layout import StoreGeometry
from elastic.memory.mapped_storage import MappedStorage
from elastic.memory.page_pool import PagePool
from elastic.memory.virtual_range import VirtualRange


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
        self._range = VirtualRange(pool, geometry.rows * geometry.row_slots, readable_gaps=geometry.layout.has_gaps)
        self._spans: list[MappedStorage] = []  # the last one is current; earlier ones are shown by tensors outside
        self._flat: torch.Tensor | None = None

    @property
    def pages(self) -> int:
        """Mapped pages."""
        return len(self._range.slots)

    @property
    def page_ids(self) -> list[int]:
        return list(self._range.slots.values())

    @property
    def shown_outside(self) -> bool:
        """Whether tensors that Elastic does not hold show this memory. Drops Elastic's own."""
        self._flat = None
        for span in self._spans:
            span.drop()
        self._spans = [span for span in self._spans if span.alive]
        return bool(self._spans)

    def missing(self, first: int, stop: int) -> int:
        """Pages to add before the window reaches `stop` (and starts at `first`, if it is empty now)."""
        return self.geometry.rows * max(0, stop - (self.stop if self.pages else first))

    def extend(self, first: int, stop: int, pages: Sequence[int]) -> None:
        """Map `pages`, as many as `missing` said, at the end of every row; all or none."""
        at = self.stop if self.pages else first
        count = stop - at
        done = 0
        try:
            for row in range(self.geometry.rows):
                self._range.map(self._slot(row, at), pages[row * count : (row + 1) * count])
                done += 1
        except BaseException:
            for row in range(done):
                self._range.unmap(self._slot(row, at), count)
            raise
        self.first, self.stop = (self.first if self.stop > self.first else first), stop
        self._renew()

    def retreat(self, first: int, stop: int) -> int:
        """Shrink the window to [first, stop) and park the pages outside it; returns how many, all or none.

        Nothing happens while tensors outside show the memory.
        """
        first, stop = max(first, self.first), min(stop, self.stop)
        cuts = [(self.first, first), (stop, self.stop)] if first < stop else [(self.first, self.stop)]
        cuts = [cut for cut in cuts if cut[0] < cut[1]]
        if not cuts or self.shown_outside:
            return 0
        pages = self._unmap(cuts)
        self.first, self.stop = (first, stop) if first < stop else (0, 0)
        self._pool.free(pages)
        return len(pages)

    def view(self, start: int, stop: int) -> torch.Tensor:
        """Tokens [start, stop) of the window, [batch, heads, stop - start, dim]."""
        g = self.geometry
        if start == stop:
            with torch.inference_mode(False):
                return torch.empty((g.batch, g.heads, 0, g.dim), dtype=g.dtype, device=self._pool.backend.device)
        if self._flat is None:
            self._renew()
        assert self._flat is not None
        offset = start * g.token_stride - self.first * g.page_bytes // g.dtype.itemsize
        return self._flat.as_strided((g.batch, g.heads, stop - start, g.dim), g.strides, offset)

    def close(self) -> None:
        """Give the address space of an empty buffer back."""
        self._range.close()

    def _slot(self, row: int, slot: int) -> int:
        return row * self.geometry.row_slots + slot

    def _unmap(self, cuts: list[tuple[int, int]]) -> list[int]:
        done: list[tuple[int, list[int]]] = []
        try:
            for row in range(self.geometry.rows):
                for a, b in cuts:
                    done.append((self._slot(row, a), self._range.unmap(self._slot(row, a), b - a)))
        except BaseException:
            for slot, pages in done:
                self._range.map(slot, pages)
            raise
        return [page for _, pages in done for page in pages]

    def _renew(self) -> None:
        """Show the window as it is now, by a storage of exactly its size."""
        self._flat = None
        for span in self._spans:
            span.drop()
        self._spans = [span for span in self._spans if span.alive]
        if self.stop > self.first:
            slots = (self.geometry.rows - 1) * self.geometry.row_slots + self.stop - self.first
            self._spans.append(self._range.storage(self.first, slots * self.geometry.page_bytes, self._on_dead))
            self._flat = self._spans[-1].tensor(self.geometry.dtype)
