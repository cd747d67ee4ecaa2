"""The KV cache of one decoder layer of one generation: keys, values, and the tokens they must hold."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

from elastic.kvcache.storage.buffer import KVBuffer
from elastic.kvcache.storage.layout import StoreGeometry
from elastic.memory.backends.streams import finish_queued_work, note_current_stream
from elastic.memory.page_pool import PagePool


class StoreState(Enum):
    """LIVE: a cache uses it. RETAINED: the cache is gone, tensors outside still show it. IDLE: free to adopt."""

    LIVE = "live"
    RETAINED = "retained"
    IDLE = "idle"
    CLOSED = "closed"


class LayerStore:
    """A pair of buffers that grow and shrink together. Guarded by the lock of its KV pool."""

    def __init__(
        self, pool: PagePool, geometries: tuple[StoreGeometry, StoreGeometry], on_dead: Callable[[], Any]
    ) -> None:
        self.pool = pool
        self.geometries = geometries
        self.buffers = KVBuffer(pool, geometries[0], on_dead), KVBuffer(pool, geometries[1], on_dead)
        self.state = StoreState.LIVE
        self.limit_epoch = 0
        """The revision of the KV limit when the present cache took this store."""
        self.lease = 0
        """Counts the caches that have used this store; a note about an earlier one is void."""
        self.start = self.stop = 0
        """The tokens that may be read or written now: pages outside them can be given away."""
        self.first_mapped = self.stop_mapped = 0
        """The tokens that pages are mapped for, in both buffers."""
        self.spare_from = 1
        """If no token before this one is kept, whole pages at the beginning hold none."""
        self.unwanted = False
        """Whether its pages are not to be kept for the next cache."""
        self.stream = torch.cuda.default_stream(pool.device) if pool.device.type == "cuda" else None
        """The CUDA stream that used it last: copies that are queued on it follow its kernels, and nobody waits."""
        self.reader: torch.cuda.Event | None = None
        """The end of the last copy of it beside its users: whoever overwrites what they hold waits for it."""
        self._left: tuple[torch.cuda.Event, int] | None = None
        """After this event no kernel reads tokens before this one."""
        self._growing = False
        """Whether pages are being found for it: its own are none of those that can be spared for that."""

    @property
    def pages(self) -> int:
        """Mapped pages."""
        return len(self.buffers[0].range.slots) + len(self.buffers[1].range.slots)

    @property
    def adoptable(self) -> bool:
        """True if a cache can begin in it: a window that slid on has left the first token behind."""
        return not self.unwanted and all(buffer.first == 0 for buffer in self.buffers)

    def begin(self, limit_epoch: int) -> None:
        """Have a cache begin in it."""
        self.limit_epoch, self.unwanted = limit_epoch, False
        self.wait_for_reader()
        self.keep(0, 0)
        self.lease += 1

    def keep(self, start: int, stop: int) -> None:
        """Have pages outside the tokens [start, stop) be such as can be given away."""
        if start < self.start:
            self._left = None
        self.start, self.stop = start, stop

    def use_on_current_stream(self) -> None:
        """Order what this thread does next after what was done on another CUDA stream. On a CPU all is in order."""
        if self.stream is None:
            return
        stream = torch.cuda.current_stream(self.pool.device)
        if stream != self.stream:
            note_current_stream(self.pool.device)
            stream.wait_stream(self.stream)
            self.stream = stream

    def wait_for_reader(self) -> None:
        """Order what this thread does next after a copy that goes on beside it."""
        if self.reader is not None:
            torch.cuda.current_stream(self.pool.device).wait_event(self.reader)
            self.reader = None

    def is_shown_outside(self) -> bool:
        """Drop the tensors that Elastic holds; return whether others still show this memory."""
        return any(buffer.is_shown_outside() for buffer in self.buffers)

    def extend(self, start: int, stop: int, owner: str) -> None:
        """Map pages for the tokens [start, stop). Raises `CapacityError`; pages mapped by then stay, as spare ones."""
        counts = [buffer.missing(start, stop) for buffer in self.buffers]
        self._growing = True
        try:
            pages = self.pool.allocate(owner, sum(counts))
        finally:
            self._growing = False
        for buffer, count in zip(self.buffers, counts, strict=True):
            if not count:
                continue
            try:
                buffer.extend(start, stop, pages[:count])
            except BaseException:
                self.pool.free(pages)
                raise
            finally:
                self._note_windows()
            pages = pages[count:]

    def spare(self) -> int:
        """Count the mapped pages that hold none of the tokens [start, stop)."""
        return 0 if self._growing else sum(buffer.spare(self.start, self.stop) for buffer in self.buffers)

    def trim(self) -> int:
        """Give spare pages back, as far as no tensor outside shows them; return how many."""
        if self._growing:
            return 0
        finish_queued_work(self.pool.device)  # no kernel may still read or write what is unmapped (law 6)
        return self._retreat(self.start, self.stop)

    def slide(self) -> int:
        """Give back the pages that a window has left behind, without waiting; return how many.

        On CUDA that is at one of the next calls: when what was queued at the first one is over.
        """
        if self.stream is None:
            return self.trim()
        if self._left is None:
            self._left = self.stream.record_event(), self.start
        event, start = self._left
        if not all(recorded.query() for recorded in (event, self.reader) if recorded is not None):  # type: ignore[no-untyped-call]
            return 0
        self._left = None
        return self._retreat(start, sys.maxsize)

    def close(self) -> None:
        """Give the address space of an empty store back."""
        assert not self.pages, "trim first"
        self.state = StoreState.CLOSED
        for buffer in self.buffers:
            buffer.range.close()

    def _retreat(self, start: int, stop: int) -> int:
        try:
            return sum(buffer.retreat(start, stop) for buffer in self.buffers)
        finally:
            self._note_windows()

    def _note_windows(self) -> None:
        """Translate the buffers' windows of slots into tokens: what each decode step asks is one comparison."""
        sizes = [(buffer, buffer.geometry.token_bytes, buffer.geometry.page_bytes) for buffer in self.buffers]
        self.first_mapped = max(-(-buffer.first * page // token) for buffer, token, page in sizes)
        self.stop_mapped = min(buffer.stop * page // token for buffer, token, page in sizes)
        self.spare_from = min(-(-(buffer.first + 1) * page // token) for buffer, token, page in sizes)
