"""Pages that travel between weights and the KV cache, and those that are kept back for a swap."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from elastic.errors import CapacityError
from elastic.kvcache.storage.budget import WeightsShare
from elastic.memory.pages.page_pool import PagePool

if TYPE_CHECKING:
    from elastic.kvcache.manager import KVMemory


OWNER = "staging"


class StagingReserve:
    """Up to `pages` pages of a place, kept back so that a layer can be swapped when all others are taken.

    They are counted in the ledger as `staging`.
    """

    def __init__(self, pool: PagePool, pages: int) -> None:
        self.pool = pool
        self.pages = pages
        self.ready = 0
        """Pages that are there."""

    def fill(self) -> None:
        """Have all of it. Raises `CapacityError`."""
        self.pool.reserve(OWNER, self.pages - self.ready)
        self.ready = self.pages

    def refill(self, pages: int) -> int:
        """Take back what is missing, out of `pages` that have just come free; returns how many are left over.

        Where others were faster, nothing is taken: the next pages that come free are.
        """
        taken = max(0, min(pages, self.pages - self.ready))
        if taken:
            try:
                self.pool.reserve(OWNER, taken)
                self.ready += taken
            except CapacityError:
                return pages
        return pages - taken

    @contextmanager
    def opened(self, pages: int) -> Iterator[None]:
        """Within: `pages` of it are free, and nobody else gets them; what is not taken by then returns."""
        with self.pool.mapping_lock:
            self.pool.unreserve(OWNER, pages)
            self.ready -= pages
            try:
                yield
            except BaseException:
                self.refill(pages)
                raise

    def close(self) -> None:
        """Give all of it back."""
        self.pool.unreserve(OWNER, self.ready)
        self.pages = self.ready = 0


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

    def take_from_cache(self, place: str, pages: int, held_back: int | None = None) -> bool:
        """Have caches do without these pages from now on; return whether they can. `held_back`: see `WeightsShare`."""
        pool, share = self._pools[place], self.shares[place]
        if share.take_from_cache(pages, held_back):
            return True
        copies = self._memory.copy_resting(pool, share.shortfall(pages)) if pool.host_offload else []
        if not copies:
            return False
        with self._exclusive():
            moved = [copy.layer.move_to_host(copy) for copy in copies]
        return any(moved) and share.take_from_cache(pages, held_back)
