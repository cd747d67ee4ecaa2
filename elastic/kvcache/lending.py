"""Pages that travel between weights and the KV cache."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from elastic.kvcache.pool import KVPool

if TYPE_CHECKING:
    from elastic.kvcache.lease import HostCopy
    from elastic.kvcache.memory import KVMemory


class KVLender:
    """Gives the KV caches of an instance what its weights give up, and asks it back: nothing cached is discarded.

    `exclusive` makes the safe point at which caches at rest move to host memory, the last rung of the ladder.
    """

    def __init__(self, memory: KVMemory, exclusive: Callable[[], AbstractContextManager[float]]) -> None:
        self._memory = memory
        self._pools = {pool.pool.name: pool for pool in memory.pools}
        self._exclusive = exclusive

    def lend(self, place: str, pages: int) -> None:
        """Caches may count on these pages from now on."""
        self._pools[place].lend(pages)

    def claim(self, place: str, pages: int) -> bool:
        """Whether caches could do without these pages, and do from now on."""
        pool = self._pools[place]
        return pool.claim(pages) or (pool.host_offload and self._offload(pool, pages) and pool.claim(pages))

    def reserve(self, place: str, pages: int) -> None:
        """Weights wait for these pages: no new cache gets them. 0: they wait no more."""
        self._pools[place].reserve(pages)

    def settle(self, place: str, pages: int) -> None:
        """Weights that take so many pages have come to stay, or gone for good (below zero)."""
        self._pools[place].settle(pages)

    def room(self, place: str) -> int:
        """Pages that could be claimed if no cache were alive."""
        return self._pools[place].room()

    def could_claim(self, place: str, pages: int) -> bool:
        """Whether `claim` would succeed without moving anything to the host."""
        return not self._pools[place].excess(pages)

    def _offload(self, pool: KVPool, pages: int) -> bool:
        """Move caches that rest to host memory; whether any moved."""
        copies: list[HostCopy] = []
        missing = pool.excess(pages)
        for layer in self._memory.resting(pool):
            copy = layer.copy_to_host() if missing > 0 else None
            if copy is not None:
                missing -= layer.pages
                copies.append(copy)
        if not copies:
            return False
        with self._exclusive():
            moved = [copy.layer.move_to_host(copy) for copy in copies]
        return any(moved)
