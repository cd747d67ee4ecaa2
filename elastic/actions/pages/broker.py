"""Pages that travel between weights and the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from elastic.actions.pages.staging_reserve import StagingReserve
from elastic.kvcache.storage.budget import WeightsShare
from elastic.kvcache.storage.pool import KVPool

if TYPE_CHECKING:
    from elastic.kvcache.layers.full import OffloadedTokens
    from elastic.kvcache.manager import KVMemory


class PageBroker:
    """Gives the KV caches of an instance what its weights give up, and asks it back: nothing cached is discarded.

    What comes free goes to the staging reserves first. `exclusive` makes the safe point at which caches at rest move to
    host memory, the last rung of the ladder.
    """

    def __init__(
        self,
        memory: KVMemory,
        reserves: Mapping[str, StagingReserve],
        exclusive: Callable[[], AbstractContextManager[float]],
    ) -> None:
        self.reserves = dict(reserves)
        self._memory = memory
        self._pools = {pool.pool.name: pool for pool in memory.pools}
        self._shares = {pool.pool.name: WeightsShare(pool) for pool in memory.pools}
        self._exclusive = exclusive

    def give_to_cache(self, place: str, pages: int) -> None:
        """Reserves and caches may count on these pages from now on."""
        reserve = self.reserves.get(place)
        self._shares[place].give_to_cache(reserve.refill(pages) if reserve else pages)

    def take_from_cache(self, place: str, pages: int) -> bool:
        """Whether caches could do without these pages, and do from now on."""
        pool, share = self._pools[place], self._shares[place]
        return share.take_from_cache(pages) or (
            pool.host_offload and self._offload(pool, share.shortfall(pages)) and share.take_from_cache(pages)
        )

    def hold_back(self, place: str, pages: int) -> None:
        """Weights wait for these pages: no new cache gets them. 0: they wait no more."""
        self._shares[place].hold_back(pages)

    def record_resident(self, place: str, pages: int) -> None:
        """Weights that take so many pages have come to stay, or gone for good (below zero)."""
        self._shares[place].record_resident(pages)

    def claimable(self, place: str) -> int:
        """Pages that could be claimed if no cache were alive."""
        return self._shares[place].claimable()

    def could_take(self, place: str, pages: int) -> bool:
        """Whether `take_from_cache` would succeed without moving anything to the host."""
        return not self._shares[place].shortfall(pages)

    def _offload(self, pool: KVPool, missing: int) -> bool:
        """Move caches that rest to host memory, until so many pages came free; return whether any moved."""
        copies: list[OffloadedTokens] = []
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
