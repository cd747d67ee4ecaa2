"""Pages that travel between weights and the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from elastic.actions.pages.staging_reserve import StagingReserve
from elastic.kvcache.storage.budget import WeightsShare

if TYPE_CHECKING:
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
        self.shares = {pool.pool.name: WeightsShare(pool) for pool in memory.pools}
        """By place."""
        self._memory = memory
        self._pools = {pool.pool.name: pool for pool in memory.pools}
        self._exclusive = exclusive

    def give_to_cache(self, place: str, pages: int) -> None:
        """Let reserves and caches count on these pages from now on."""
        reserve = self.reserves.get(place)
        self.shares[place].give_to_cache(reserve.refill(pages) if reserve else pages)

    def take_from_cache(self, place: str, pages: int) -> bool:
        """Have caches do without these pages from now on; return whether they can."""
        pool, share = self._pools[place], self.shares[place]
        if share.take_from_cache(pages):
            return True
        copies = self._memory.copy_resting(pool, share.shortfall(pages)) if pool.host_offload else []
        if not copies:
            return False
        with self._exclusive():
            moved = [copy.layer.move_to_host(copy) for copy in copies]
        return any(moved) and share.take_from_cache(pages)
