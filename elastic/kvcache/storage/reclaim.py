"""The ladder by which a KV pool gives pages back: what no cache uses first, then what live caches can spare."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from elastic.errors import ElasticError
from elastic.kvcache.storage.layer_store import LayerStore, StoreState
from elastic.kvcache.storage.usage import PoolUsage
from elastic.memory.pages.page_pool import PagePool

logger = logging.getLogger(__name__)


class Reclaimer:
    """Guarded by the lock of the KV pool. Nothing that a cache holds is discarded on any rung."""

    def __init__(self, pool: PagePool, usage: PoolUsage, idle_share: float) -> None:
        self.pool = pool
        self.usage = usage
        self.idle_share = idle_share
        """The watermark: the share of the limit that stores without a cache may keep mapped for the next one."""
        self.unfinished = False
        """Whether something could not be given back, and `fit` is to try again."""

    def unmap(self, pages: int) -> int:
        """Give back about so many pages, by all rungs; return how many."""
        freed = self.unmap_idle(pages)
        return freed + self.trim_live(pages - freed)

    def unmap_idle(self, pages: int) -> int:
        """Give back about so many idle pages: of stores, the longest idle first, then of sectors; return how many."""
        freed = 0
        for store in self.usage.stores_in(StoreState.IDLE):
            if freed >= pages:
                break
            freed += store.trim()
            self.usage.stores.remove(store)
            store.close()
        for sectors in self.usage.sectors:
            if freed < pages:
                freed += sectors.trim(pages - freed)
        return freed

    def trim_live(self, pages: float = math.inf, but: LayerStore | None = None) -> int:
        """Give back about so many pages of live stores that hold no token; return how many."""
        freed = 0
        for store in self.usage.stores_in(StoreState.LIVE):
            if freed >= pages:
                break
            if store is not but and store.spare():
                freed += store.trim()
        return freed

    def fit_mapped(self, limit: int) -> None:
        """Bring what is mapped under the limit, and what is idle under the watermark."""
        for store in self.usage.stores_in(StoreState.IDLE):
            if not store.adoptable:
                store.trim()
                store.unwanted = bool(store.pages)
        self.unmap(self.usage.used + self.usage.idle - limit)
        self.unmap_idle(self.usage.idle - int(limit * self.idle_share))

    def fit(self, limit: int) -> None:
        """Bring what is mapped under the limit, and give free pages back to the system."""
        self.fit_mapped(limit)
        self.pool.trim(keep=self.ready_pages(limit, self.usage.used + self.usage.idle))

    def ready_pages(self, limit: int, mapped: int) -> int:
        """Count the cached pages worth keeping for caches that grow."""
        return max(0, min(self.pool.ready_pages, limit - mapped))

    def tidy(self, work: Callable[[], object]) -> None:
        """Do what can as well be done later: where the driver refuses it, the caller is served all the same."""
        try:
            work()
            self.unfinished = False
        except ElasticError as error:
            self.unfinished = True
            logger.warning("pages of %s could not be given back yet: %s", self.pool.name, str(error))
