"""What one KV pool has mapped: stores of caches, and the sectors of engines that cache in blocks."""

from __future__ import annotations

from typing import Protocol

from elastic.kvcache.storage.layer_store import LayerStore, StoreState
from elastic.kvcache.storage.layout import StoreGeometry


class SectorUsage(Protocol):
    """Pages that an engine hands out in sectors of blocks."""

    @property
    def used_pages(self) -> int:
        """In sectors that hold tokens of live requests."""
        ...

    @property
    def idle_pages(self) -> int:
        """Mapped in other sectors."""
        ...

    @property
    def promised_pages(self) -> int:
        """That live requests must still get, one after another, if all of them are to end."""
        ...

    def trim(self, pages: int) -> int:
        """Give idle sectors back until `pages` pages came free; returns how many did."""
        ...

    def check(self) -> None:
        """Recount; raises `IntegrityError`."""
        ...


class PoolUsage:
    """Guarded by the lock of the KV pool. Sums are pages."""

    def __init__(self) -> None:
        self.stores: list[LayerStore] = []
        """All that are not closed; idle ones in the order they were left."""
        self.sectors: list[SectorUsage] = []

    def live(self) -> list[LayerStore]:
        return self._in(StoreState.LIVE)

    def idle_stores(self) -> list[LayerStore]:
        return self._in(StoreState.IDLE)

    @property
    def used(self) -> int:
        """For caches that are alive."""
        return self._pages(StoreState.LIVE) + sum(sectors.used_pages for sectors in self.sectors)

    @property
    def promised(self) -> int:
        """That must remain to be had beside those in use."""
        return sum(sectors.promised_pages for sectors in self.sectors)

    @property
    def idle(self) -> int:
        """Kept for the next cache."""
        return self._pages(StoreState.IDLE) + sum(sectors.idle_pages for sectors in self.sectors)

    @property
    def retained(self) -> int:
        """Shown by tensors outside, their cache gone."""
        return self._pages(StoreState.RETAINED)

    def spare(self) -> int:
        """Pages of live stores that hold no token and no tensor outside shows."""
        return sum(s.spare() for s in self.live() if not s.shown_outside)

    def trim_live(self, but: LayerStore | None = None) -> int:
        """Give spare pages of live stores back; returns how many."""
        return sum(s.trim() for s in self.live() if s is not but and s.spare())

    def trim_unadoptable(self) -> None:
        """Give back what no cache can begin in, or is not to."""
        for store in self.idle_stores():
            if not store.adoptable:
                store.trim()
                store.unwanted = bool(store.pages)

    def adopt(self, geometries: tuple[StoreGeometry, StoreGeometry], room: int) -> LayerStore | None:
        """The largest idle store of these shapes with at most `room` pages; it is live then."""
        fitting = [s for s in self.idle_stores() if s.geometries == geometries and s.adoptable and s.pages <= room]
        if not fitting:
            return None
        store = max(fitting, key=lambda s: s.pages)
        store.state = StoreState.LIVE
        return store

    def leave(self, store: LayerStore) -> None:
        """A store is idle from now on, as the last one left."""
        store.state = StoreState.IDLE
        self.stores.remove(store)
        self.stores.append(store)

    def unmap(self, pages: int) -> int:
        """Give back about so many pages: idle ones, the longest idle first, then spare ones of live stores."""
        freed = self.unmap_idle(pages)
        for store in self.live():
            if freed >= pages:
                break
            if store.spare():
                freed += store.trim()
        return freed

    def unmap_idle(self, pages: int) -> int:
        """Give back about so many idle pages, the longest idle first; returns how many."""
        freed = 0
        for store in self.idle_stores():
            if freed >= pages:
                break
            freed += store.trim()
            self.stores.remove(store)
            store.close()
        for sectors in self.sectors:
            if freed < pages:
                freed += sectors.trim(pages - freed)
        return freed

    def _in(self, state: StoreState) -> list[LayerStore]:
        return [store for store in self.stores if store.state is state]

    def _pages(self, state: StoreState) -> int:
        return sum(store.pages for store in self._in(state))
