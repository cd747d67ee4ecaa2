"""The KV cache of one decoder layer of one generation in pages: keys, values, and the tokens they must hold."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch

from elastic.kvcache.storage.layout import StoreGeometry
from elastic.memory.backends.streams import finish_queued_work, note_current_stream
from elastic.memory.pages.mapped_storage import MappedStorage
from elastic.memory.pages.page_pool import PagePool
from elastic.memory.pages.virtual_range import VirtualRange, map_all, unmap_all


class KVBuffer:
    """The keys, or the values: every row shows the same window of slots, [first, stop). Guarded as the store is.

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
        self.token_bytes = sum(g.batch * g.heads * g.dim * g.dtype.itemsize for g in geometries)
        """Keys and values of one token in all rows."""
        keys = KVBuffer(pool, geometries[0], on_dead)
        try:
            self.buffers = keys, KVBuffer(pool, geometries[1], on_dead)
        except BaseException:
            keys.range.close()
            raise
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
        self._forms = tuple((g.batch, g.heads, g.dim, g.dtype) for g in geometries)

    @property
    def pages(self) -> int:
        """Mapped pages."""
        return len(self.buffers[0].range.slots) + len(self.buffers[1].range.slots)

    @property
    def adoptable(self) -> bool:
        """True if a cache can begin in it: a window that slid on has left the first token behind."""
        return not self.unwanted and all(buffer.first == 0 for buffer in self.buffers)

    def fits(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Return whether keys and values, [batch, kv_heads, tokens, head_dim] each, can be stored in it."""
        key_batch, key_heads, _, key_dim = keys.shape
        value_batch, value_heads, _, value_dim = values.shape
        given = (key_batch, key_heads, key_dim, keys.dtype), (value_batch, value_heads, value_dim, values.dtype)
        return given == self._forms

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
        """Order what this thread does next after what was done on another CUDA stream."""
        stream = torch.cuda.current_stream(self.pool.device)
        if self.stream is not None and stream != self.stream:
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
