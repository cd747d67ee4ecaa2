"""Pages of a KV pool that are kept for one user: nobody else gets them, whether they are in use or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.kvcache.storage.pool import OWNER, KVPool


@dataclass
class Reservation:
    """Free pages of a place, counted in its ledger as those of KV. Guarded by the lock of the KV pool."""

    kv: KVPool
    pages: int = 0

    def resize(self, pages: int) -> None:
        """Keep so many. Raises `CapacityError` where caches and their promises leave fewer; nothing has changed."""
        kv, change = self.kv, pages - self.pages
        with kv.lock:
            if change > 0:
                kv.require_available(change)
                kv.reclaimer.unmap_idle(change - kv.pool.free_pages)
                kv.pool.reserve(OWNER, change)
            else:
                kv.pool.unreserve(OWNER, -change)
            self._count(change)
            if change < 0:
                kv.note_free()

    def take(self, count: int) -> list[int]:
        """Return pages of it, to be mapped: they are owned now. Raises `CapacityError` where none can be created."""
        kv = self.kv
        with kv.lock:  # nobody takes the pages in between
            kv.pool.unreserve(OWNER, count)
            self._count(-count)
            try:
                kv.make_way(count)
                return kv.pool.allocate(OWNER, count)
            except BaseException:
                kv.pool.reserve(OWNER, count)
                self._count(count)
                raise

    def put_back(self, pages: Sequence[int]) -> None:
        """Undo `take`; nothing shows the pages any more."""
        kv = self.kv
        with kv.lock:
            kv.pool.free(pages)
            kv.pool.reserve(OWNER, len(pages))
            self._count(len(pages))

    def _count(self, change: int) -> None:
        self.pages += change
        self.kv.reserved += change
