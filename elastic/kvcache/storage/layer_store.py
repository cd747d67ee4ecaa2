"""The KV cache of one decoder layer of one generation: keys, values, and the tokens they must hold."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

from elastic.kvcache.storage.buffer import KVBuffer
from elastic.kvcache.storage.layout import StoreGeometry
from elastic.memory.page_pool import PagePool


class StoreState(Enum):
    """LIVE: a cache uses it. RETAINED: the cache is gone, tensors outside still show it. IDLE: free to adopt."""

    LIVE = "live"
    RETAINED = "retained"
    IDLE = "idle"
    CLOSED = "closed"


class LayerStore:
    """A pair of buffers that grow and shrink together. Guarded by the lock of its KV pool."""

    def __init__(self, pool: PagePool, keys: StoreGeometry, values: StoreGeometry, on_dead: Callable[[], Any]) -> None:
        self.pool = pool
        self.state = StoreState.LIVE
        self.limit_epoch = 0
        """The revision of the KV limit when the present cache took this store."""
        self.lease = 0
        """Counts the caches that have used this store; a note about an earlier one is void."""
        self.start = self.stop = 0
        """The tokens that may be read or written now: pages outside them can be given away."""
        self.unwanted = False
        """Whether its pages are not to be kept for the next cache."""
        self._growing = False
        """Whether pages are being found for it: its own are none of those that can be spared for that."""
        self.stream = 0
        """The CUDA stream that used it last."""
        self.keys = KVBuffer(pool, keys, on_dead)
        self.values = KVBuffer(pool, values, on_dead)

    @property
    def buffers(self) -> tuple[KVBuffer, KVBuffer]:
        return self.keys, self.values

    @property
    def geometries(self) -> tuple[StoreGeometry, StoreGeometry]:
        return self.keys.geometry, self.values.geometry

    @property
    def pages(self) -> int:
        return self.keys.pages + self.values.pages

    @property
    def shown_outside(self) -> bool:
        return any(buffer.shown_outside for buffer in self.buffers)

    @property
    def adoptable(self) -> bool:
        """Whether a cache can begin in it: a window that slid on has left the first token behind."""
        return not self.unwanted and all(b.first == 0 for b in self.buffers)

    def missing(self, start: int, stop: int) -> int:
        """Pages to add before the tokens [start, stop) are mapped."""
        return sum(b.missing(*b.geometry.slots(start, stop)) for b in self.buffers)

    def holds(self, start: int, stop: int) -> bool:
        """Whether the tokens [start, stop) are mapped."""
        for b in self.buffers:
            size, page = b.geometry.token_bytes, b.geometry.page_bytes
            if start * size < b.first * page or stop * size > b.stop * page:
                return False
        return True

    def has_pages_before(self, start: int) -> bool:
        """Whether whole pages lie before token `start`."""
        return any(start * b.geometry.token_bytes // b.geometry.page_bytes > b.first for b in self.buffers)

    def extend(self, start: int, stop: int, owner: str) -> None:
        """Map pages for the tokens [start, stop). Raises `CapacityError`; pages mapped by then stay, as spare ones."""
        windows = [b.geometry.slots(start, stop) for b in self.buffers]
        counts = [b.missing(*w) for b, w in zip(self.buffers, windows, strict=True)]
        self._growing = True
        try:
            pages = self.pool.allocate(owner, sum(counts))
        finally:
            self._growing = False
        for buffer, window, count in zip(self.buffers, windows, counts, strict=True):
            if not count:
                continue
            try:
                buffer.extend(*window, pages[:count])
            except BaseException:
                self.pool.free(pages)
                raise
            pages = pages[count:]

    def spare(self) -> int:
        """Mapped pages that hold none of the tokens [start, stop)."""
        return 0 if self._growing else self.pages - self._needed()

    def trim(self) -> int:
        """Give spare pages back, as far as no tensor outside shows them; returns how many."""
        if self._growing:
            return 0
        self.settle()
        return sum(b.retreat(*b.geometry.slots(self.start, self.stop)) for b in self.buffers)

    def settle(self) -> None:
        """Wait until no kernel can still read or write it: before pages are unmapped (law 6) or copied elsewhere."""
        if self.pool.backend.device.type == "cuda":
            torch.cuda.synchronize(self.pool.backend.device)

    def close(self) -> None:
        """Give the address space of an empty store back."""
        assert not self.pages, "trim first"
        self.state = StoreState.CLOSED
        for buffer in self.buffers:
            buffer.close()

    def _needed(self) -> int:
        windows = (b.geometry.slots(self.start, self.stop) for b in self.buffers)
        return sum(b.geometry.rows * (w[1] - w[0]) for b, w in zip(self.buffers, windows, strict=True))
