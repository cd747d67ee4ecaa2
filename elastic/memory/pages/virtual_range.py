"""Address space reserved once, with pages that come and go under it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from elastic.memory.backends.base import runs
from elastic.memory.pages.mapped_storage import MappedStorage
from elastic.memory.pages.page_pool import PagePool


class VirtualRange:
    """`slots` of one page each at fixed addresses; a slot shows a page or nothing.

    Not thread-safe: its owner guards it. A slot is unmapped only when no tensor shows it (`MappedStorage.alive`).
    """

    def __init__(self, pool: PagePool, capacity: int, *, readable_gaps: bool = False) -> None:
        self.pool = pool
        self.capacity = capacity
        self.readable_gaps = readable_gaps
        self.slots: dict[int, int] = {}  # slot -> page
        self._closed = False
        with pool.mapping_lock:
            self.address = pool.backend.reserve(capacity * pool.page_bytes, readable_gaps=readable_gaps)
            pool.ranges.add(self)

    def map(self, slot: int, pages: Sequence[int]) -> None:
        """Show `pages`, taken from the pool, in consecutive slots; all or none. Raises `CapacityError`."""
        assert 0 <= slot <= self.capacity - len(pages), (slot, len(pages), self.capacity)
        address = self.address + slot * self.pool.page_bytes
        self.pool.backend.map(address, pages, readable_gaps=self.readable_gaps)
        self.slots.update(zip(range(slot, slot + len(pages)), pages, strict=True))

    def unmap(self, slot: int, count: int) -> list[int]:
        """Empty `count` mapped slots and return their pages, still owned, in order."""
        address = self.address + slot * self.pool.page_bytes
        self.pool.backend.unmap(address, count, readable_gaps=self.readable_gaps)
        return list(map(self.slots.pop, range(slot, slot + count)))

    def storage(self, slot: int, nbytes: int, on_dead: Callable[[], Any]) -> MappedStorage:
        """Offer `nbytes` of memory from a slot on to torch; `on_dead` is called when its last tensor has died."""
        return MappedStorage(self.address + slot * self.pool.page_bytes, nbytes, self.pool.device, on_dead)

    def close(self) -> None:
        """Give every page and the address space back. Can be called twice."""
        if self._closed:
            return
        for first, count in runs(sorted(self.slots)):
            self.pool.free(self.unmap(first, count))
        self.pool.backend.unreserve(self.address, self.capacity * self.pool.page_bytes)
        self._closed = True


def map_all(parts: Iterable[tuple[VirtualRange, int, Sequence[int]]]) -> None:
    """Show pages in each (range, first slot, pages), all or none. Raises `CapacityError`."""
    done: list[tuple[VirtualRange, int, int]] = []
    try:
        for target, slot, pages in parts:
            target.map(slot, pages)
            done.append((target, slot, len(pages)))
    except BaseException:
        for target, slot, count in done:
            target.unmap(slot, count)
        raise


def unmap_all(parts: Iterable[tuple[VirtualRange, int, int]]) -> list[int]:
    """Empty the slots of each (range, first slot, count), all or none; return their pages, in order."""
    done: list[tuple[VirtualRange, int, list[int]]] = []
    try:
        for source, slot, count in parts:
            done.append((source, slot, source.unmap(slot, count)))
    except BaseException:
        for source, slot, pages in done:
            source.map(slot, pages)
        raise
    return [page for _, _, pages in done for page in pages]
