"""The books of one KV pool: what it may have, and what stores of caches and sectors of engines have of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from elastic.kvcache.storage.layer_store import LayerStore, StoreState
from elastic.kvcache.storage.layout import StoreGeometry
from elastic.memory.pages.page_pool import PagePool


@dataclass(frozen=True)
class KVLimits:
    """The pages that caches may have: a limit that its user moves, and a maximum that moves with the weights.

    Immutable: each change makes another one, so that a failed change is undone by keeping the old one.
    """

    maximum: int
    """The highest limit: the budget less what weights have."""
    limit: int
    """As last set; at the maximum it follows the maximum."""
    floor: int
    """The maximum that weights leave to caches at the least."""
    held_back: int = 0
    """Pages that weights wait for: new caches do not get them."""
    revision: int = 0
    shrinks: int = 0
    """Counts how often caches that live were promised more than new ones."""

    @property
    def open(self) -> int:
        """The limit for new caches."""
        return max(0, min(self.limit, self.maximum - self.held_back))

    def with_limit(self, limit: int, revision: int | None) -> KVLimits:
        """Set the limit, under a revision (None: the next)."""
        revision = self.revision + 1 if revision is None else revision
        return replace(self, limit=limit, revision=revision, shrinks=self.shrinks + (limit < self.limit))

    def with_maximum(self, maximum: int) -> KVLimits:
        """Set the maximum; a limit at the old one follows."""
        limit = maximum if self.limit == self.maximum else min(self.limit, maximum)
        return replace(self, maximum=maximum, limit=limit)


@dataclass(frozen=True, eq=False)
class SectorUsage:
    """Pages that an engine hands out in sectors of blocks, as it answers under the lock of the KV pool."""

    used: Callable[[], int]
    """Pages in sectors that hold tokens of live requests."""
    check: Callable[[], None]
    """Recounts; raises `IntegrityError`."""
    idle: Callable[[], int] = lambda: 0
    """Pages mapped in other sectors."""
    promised: Callable[[], int] = lambda: 0
    """Pages that live requests must still get, one after another, if all of them are to end."""
    owed: Callable[[], int] = lambda: 0
    """The same, of requests that have some already; also what waits is promised pages."""
    trim: Callable[[int], int] = lambda pages: 0
    """Gives idle sectors back until so many pages came free; returns how many did."""


class PoolUsage:
    """Counts in pages. Guarded by the lock of the KV pool."""

    def __init__(self) -> None:
        self.stores: list[LayerStore] = []
        """All that are not closed; idle ones in the order in which they became idle."""
        self.sectors: list[SectorUsage] = []
        """Of each engine that caches here in blocks."""

    @property
    def used(self) -> int:
        """Pages for caches that are alive."""
        return self.pages_in(StoreState.LIVE) + sum(sectors.used() for sectors in self.sectors)

    @property
    def idle(self) -> int:
        """Pages kept for the next cache."""
        return self.pages_in(StoreState.IDLE) + sum(sectors.idle() for sectors in self.sectors)

    def promised(self, *, but: SectorUsage | None = None) -> int:
        """Pages that were promised in sectors, to all engines but one."""
        return sum(sectors.promised() for sectors in self.sectors if sectors is not but)

    @property
    def owed(self) -> int:
        """Pages without which live requests could not all end, one after another."""
        return sum(sectors.owed() for sectors in self.sectors)

    def beside_others(self, pool: PagePool, user: object, *, growing: bool) -> int:
        """Return the pages to be had of the idle ones and the free ones, of which other models claim some.

        Where something else took what was promised to all, those that live (`growing`) go on as if they were alone:
        two that left each other what neither can have would wait for ever.
        """
        there, claimed = self.idle + pool.free_pages, pool.claimed(but=user)
        return there if growing and claimed > 0 and there - claimed < self.owed else there - claimed

    def of_others(self, own: SectorUsage) -> int:
        """Pages that other engines have or were promised in sectors."""
        others = [sectors for sectors in self.sectors if sectors is not own]
        return sum(sectors.used() + sectors.promised() for sectors in others)

    def stores_in(self, state: StoreState) -> list[LayerStore]:
        """List the stores in a state."""
        return [store for store in self.stores if store.state is state]

    def pages_in(self, state: StoreState) -> int:
        """Count the pages of the stores in a state."""
        return sum(store.pages for store in self.stores if store.state is state)

    def adopt(self, geometries: tuple[StoreGeometry, StoreGeometry], room: int) -> LayerStore | None:
        """Have the largest idle store of these shapes with at most `room` pages be live; None if there is none."""
        fitting = [
            store
            for store in self.stores_in(StoreState.IDLE)
            if store.geometries == geometries and store.adoptable and store.pages <= room
        ]
        if not fitting:
            return None
        store = max(fitting, key=lambda store: store.pages)
        store.state = StoreState.LIVE
        return store
