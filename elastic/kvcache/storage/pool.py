"""The KV cache of one instance on one place: a limit that moves, stores that live, and stores kept for the next cache.

A limit binds new caches. Caches that lived when it fell may grow past it, up to the maximum; what they hold above it
is the overage, and the shrink is deferred until they end. Nothing that a cache holds is ever discarded.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable

import torch

from elastic.errors import CapacityError, ElasticError, IntegrityError, StateError
from elastic.kvcache.storage.layer_store import LayerStore, StoreState
from elastic.kvcache.storage.layout import StoreGeometry
from elastic.kvcache.storage.limits import KVLimits
from elastic.kvcache.storage.usage import PoolUsage, SectorUsage
from elastic.memory.background import janitor
from elastic.memory.page_pool import PagePool
from elastic.types import KVStatus, Resize, ResizeStatus

logger = logging.getLogger(__name__)
OWNER = "kv"
RETAINED = "retained"
IDLE_SHARE = 0.25
READY_SHARE = 1 / 32


class KVPool:
    """Stores of one instance on one place. Thread-safe, under the lock that all tenants of a page pool share.

    With `host_offload`, caches that rest may be moved to host memory by a shrink that would otherwise be deferred.
    `idle_share` is the watermark: the share of the limit that stores without a cache may keep mapped for the next one.
    `ready_share` bounds the pages created in the background before a cache asks for them: a share of those in use.
    """

    def __init__(
        self,
        pool: PagePool,
        maximum_bytes: int,
        *,
        host_offload: bool = False,
        idle_share: float = IDLE_SHARE,
        ready_share: float = READY_SHARE,
    ) -> None:
        self.pool = pool
        self.limits = KVLimits.of(maximum_bytes // pool.page_bytes)
        self.host_offload = host_offload
        self.idle_share = idle_share
        self.ready_share = ready_share
        self.on_settled: Callable[[Resize], None] = lambda result: None
        """Hears of a deferred shrink that is over. Called under the lock: it may take none."""
        self._pending: int | None = None  # the limit at which a deferred shrink is over
        self.lock = pool.mapping_lock
        self._held = PoolUsage()
        self._notes: deque[tuple[LayerStore, int]] = deque()  # (store, the lease that ended, or 0), left by finalizers
        self._untidy = False
        self._closed = False
        pool.reclaimers.append(self.reclaim)

    # -- what a cache layer does

    def lease(self, keys: StoreGeometry, values: StoreGeometry, user: object, *, born: int | None = None) -> LayerStore:
        """A store for a cache layer: an idle one of the same shape, or a new one. It returns when `user` dies.

        `born` is how often the limit had fallen when the layer's contents were begun; None: they begin now.
        """
        with self.lock:
            self._act_on_notes()
            if self._closed:
                raise StateError("the model was unwrapped; build a new cache")
            room = self.limits.open - self._held.used
            store = self._held.adopt((keys, values), room) or self._new(keys, values)
            store.limit_epoch = self.limits.shrinks if born is None else born
            store.lease += 1
            store.unwanted = False
            store.start = store.stop = 0
        weakref.finalize(user, self._note, store, store.lease).atexit = False
        return store

    def release(self, store: LayerStore, lease: int) -> None:
        """The cache layer gives its store up before it dies."""
        self._notes.append((store, lease))
        self.drain()

    def open_window(self, store: LayerStore, start: int, stop: int) -> None:
        """Have the tokens [start, stop) mapped, and nothing given away inside them until the next call.

        Raises `CapacityError` with the store as it was.
        """
        with self.lock:
            if not store.holds(start, stop):
                self._act_on_notes()
                self._admit(store, store.missing(start, stop))
                store.extend(start, stop, OWNER)
                self._create_ahead(store)
            if store.pool.backend.device.type == "cuda":
                self._order_after_last_user(store)
            store.start, store.stop = start, stop
            if start and store.has_pages_before(start):
                self._tidy(store.trim)

    def views(self, store: LayerStore, *windows: tuple[int, int]) -> list[torch.Tensor]:
        """For each window of tokens, the keys and the values of it."""
        with self.lock:
            return [b.view(*window) for window in windows for b in store.buffers]

    # -- what the sectors of an engine do

    @property
    def has_sectors(self) -> bool:
        """Whether an engine caches here in blocks."""
        return bool(self._held.sectors)

    def join(self, sectors: SectorUsage) -> None:
        """Count these sectors as part of this cache."""
        with self.lock:
            if self._closed:
                raise StateError("the model was unwrapped; make a new engine")
            self._held.sectors.append(sectors)

    def leave(self, sectors: SectorUsage) -> None:
        """Undo `join`. Can be called twice."""
        with self.lock:
            if sectors in self._held.sectors:
                self._held.sectors.remove(sectors)
                self.pool.notify()

    def available(self, *, growing: bool) -> int:
        """Pages to be had beside those in use: for requests that live (`growing`), or for new ones."""
        with self.lock:
            self._act_on_notes()
            bound = self.limits.maximum if growing else self.limits.open
            return max(0, min(bound - self._held.used, self._held.idle + self.pool.free_pages))

    def make_way(self, pages: int) -> None:
        """Give idle pages back where they and `pages` more would be above the limit."""
        with self.lock:
            excess = self._held.used + self._held.idle + pages - max(self.limits.open, self._held.used + pages)
            if excess > 0:
                self._held.unmap_idle(excess)

    # -- what the runtime does

    def resize(self, limit_bytes: int | None, revision: int | None = None) -> Resize:
        """Move the limit; None: to the maximum. Raises `CapacityError` above that; then nothing has changed."""
        with self.lock:
            self._act_on_notes()
            limit = self._pages_of_limit(limit_bytes, revision)
            if limit is None:
                return self._result("stale", 0)
            before = self.limits, self._pending
            self.limits = self.limits.moved(limit, revision)
            created = self.pool.backend.created
            try:
                self._fit()
            except BaseException:
                self.limits, self._pending = before
                raise
            self._pending = limit if self._held.used > limit else None
            released = max(0, created - self.pool.backend.created) * self.pool.page_bytes
            return self._result("applied" if self._pending is None else "deferred", released)

    def dry_run_resize(self, limit_bytes: int | None, revision: int | None = None) -> tuple[ResizeStatus, int, int]:
        """What `resize` would do if nothing changed until then: its answer, pages given back, pages over the limit."""
        with self.lock:
            self._act_on_notes()
            limit = self._pages_of_limit(limit_bytes, revision)
            if limit is None:
                return "stale", 0, 0
            spare = self._held.spare()
            mapped = self._held.used + self._held.idle
            unmapped = max(0, min(mapped - limit, self._held.idle + spare))
            parked = max(0, self.pool.cached_pages + unmapped - self._ready(limit, mapped - unmapped))
            kept = max(0, self._held.used - spare)
            return ("applied" if kept <= limit else "deferred"), parked, max(0, kept - limit)

    def give_to_cache(self, pages: int) -> None:
        """Weights gave up pages: caches may have them from now on. A limit at the maximum rises with it."""
        with self.lock:
            if self._closed:
                return
            self.limits = self.limits.lent(pages)

    def take_from_cache(self, pages: int) -> bool:
        """Weights take pages back: whether caches can do without. If so, they do; else nothing has changed."""
        with self.lock:
            self._act_on_notes()
            left = self.limits.maximum - pages
            excess = self._held.used + self._held.promised - left
            if excess > 0:
                excess -= self._held.trim_live()
            if excess > 0:
                return False
            self.limits = self.limits.lent(-pages)
            self._tidy(self._fit_mapped)  # what it parks is for the weights
            return True

    def record_resident(self, pages: int) -> None:
        """Weights of so many pages have come to stay, or gone for good (below zero): what is left is the caches'."""
        with self.lock:
            self.limits = self.limits.settled(pages)

    def claimable(self) -> int:
        """Pages that weights may claim at most: those they gave up, and those that the limit keeps from caches."""
        with self.lock:
            return self.limits.claimable + self.pool.pages_of(RETAINED)

    def hold_back(self, pages: int) -> None:
        """Weights wait for pages: new caches do not get them, those that live may go on. 0: they wait no more."""
        with self.lock:
            self.limits = self.limits.reserved(pages)
            self._tidy(self._fit)

    def shortfall(self, pages: int) -> int:
        """By how many pages live caches exceed what they may hold without `pages`."""
        with self.lock:
            self._act_on_notes()
            return max(0, self._held.used + self._held.promised + pages - self.limits.maximum)

    def reclaim(self, pages: int) -> int:
        """Free about `pages` pages: idle stores, the longest idle first, then spare pages of live ones."""
        with self.lock:
            self._act_on_notes()
            return self._held.unmap(pages)

    def trim(self) -> int:
        """Give every page that no cache needs back to the system; returns bytes."""
        with self.lock:
            self._act_on_notes()
            created = self.pool.backend.created
            self._held.unmap(self._held.used + self._held.idle)
            self.pool.unmap_idle()
            self.pool.trim()
            return (created - self.pool.backend.created) * self.pool.page_bytes

    def drain(self) -> None:
        """Act on the notes that finalizers left: caches that died, last views that went."""
        with self.lock:
            self._act_on_notes()

    def status(self) -> KVStatus:
        """A snapshot."""
        with self.lock:
            self._act_on_notes()
            size = self.pool.page_bytes
            used, idle = self._held.used, self._held.idle
            return KVStatus(
                place=self.pool.name,
                capacity_bytes=min(self.limits.open, used + idle + self.pool.free_pages) * size,
                limit_bytes=self.limits.limit * size,
                maximum_bytes=self.limits.maximum * size,
                used_bytes=used * size,
                idle_bytes=idle * size,
                retained_bytes=self._held.retained * size,
                revision=self.limits.revision,
            )

    def check(self) -> None:
        """Recount; raises `IntegrityError`."""
        with self.lock:
            self._act_on_notes()
            for store in self._held.stores:
                for b in store.buffers:
                    expected = b.geometry.rows * (b.stop - b.first)
                    if b.pages != expected:
                        raise IntegrityError(f"a buffer shows {b.pages} pages, its window says {expected}")
                if store.spare() < 0:
                    raise IntegrityError(f"a store has {store.pages} pages, {-store.spare()} too few for its tokens")
            for sectors in self._held.sectors:
                sectors.check()
            self.pool.check()

    def close(self) -> None:
        """Give back what is not shown outside; the rest goes when its last view does."""
        with self.lock:
            self._closed = True
            self.limits = KVLimits.of(0)
            self._act_on_notes()
            self._fit()
            if self.reclaim in self.pool.reclaimers:
                self.pool.reclaimers.remove(self.reclaim)

    # -- inside, under the lock

    def _pages_of_limit(self, limit_bytes: int | None, revision: int | None) -> int | None:
        """A limit in pages; None if its revision is stale. Raises `CapacityError` above the maximum."""
        if self.limits.is_stale(revision):
            return None
        maximum = self.limits.maximum
        limit = maximum if limit_bytes is None else limit_bytes // self.pool.page_bytes
        if limit > maximum:
            raise self._over(limit, maximum - self._held.used, maximum, "the KV limit is above the maximum")
        return limit

    def _new(self, keys: StoreGeometry, values: StoreGeometry) -> LayerStore:
        store = LayerStore(self.pool, keys, values, lambda: self._note(store, 0))
        self._held.stores.append(store)
        return store

    def _note(self, store: LayerStore, lease: int) -> None:
        """Called by finalizers, so from anywhere: takes no lock."""
        self._notes.append((store, lease))
        janitor.submit(self.drain)

    def _act_on_notes(self) -> None:
        acted = bool(self._notes) or self._untidy
        while self._notes:
            store, lease = self._notes.popleft()
            if store.state is StoreState.RETAINED or (store.state is StoreState.LIVE and lease == store.lease):
                self._retire(store)
        if acted:
            self._tidy(self._fit)
            if self._pending is not None and self._held.used <= self._pending:
                self._pending = None
                self.on_settled(self._result("applied", 0))
            self.pool.notify()

    def _retire(self, store: LayerStore) -> None:
        store.start = store.stop = 0
        if store.shown_outside:
            if store.state is StoreState.LIVE:
                store.state = StoreState.RETAINED
                self.pool.reassign([p for b in store.buffers for p in b.page_ids], RETAINED)
            return
        if store.state is StoreState.RETAINED:
            self.pool.reassign([p for b in store.buffers for p in b.page_ids], OWNER)
        self._held.leave(store)

    def _tidy(self, work: Callable[[], object]) -> None:
        """Do what can as well be done later: a failure is logged, the caller served, and `_fit` tried again."""
        try:
            work()
            self._untidy = False
        except ElasticError as error:
            self._untidy = True
            logger.warning("pages of %s could not be given back yet: %s", self.pool.name, str(error))

    def _admit(self, store: LayerStore, missing: int) -> None:
        bound = self.limits.bound(store.limit_epoch)
        used = self._held.used
        if used + missing > bound:
            used -= self._held.trim_live(but=store)
        if used + missing > bound:
            raise self._over(missing, bound - used, bound, "the KV cache has reached its limit")
        self.make_way(missing)

    def _create_ahead(self, store: LayerStore) -> None:
        """Have one page for each row of such a store ready: what it asks for when it next grows."""
        next_growth = sum(geometry.rows for geometry in store.geometries)
        self.pool.ready_pages = min(next_growth, int(self._held.used * self.ready_share))

    def _fit(self) -> None:
        """Bring what is mapped under its limits, and give free pages back to the system, as far as can be done."""
        self._fit_mapped()
        self.pool.trim(keep=self._ready(self.limits.open, self._held.used + self._held.idle))

    def _fit_mapped(self) -> None:
        """Bring what is mapped under the limit, and what is idle under the watermark."""
        self._held.trim_unadoptable()
        limit = self.limits.open
        self._held.unmap(self._held.used + self._held.idle - limit)
        self._held.unmap_idle(self._held.idle - int(limit * self.idle_share))

    def _ready(self, limit: int, mapped: int) -> int:
        """Parked pages worth keeping for caches that grow."""
        return max(0, min(self.pool.ready_pages, limit - mapped))

    def _order_after_last_user(self, store: LayerStore) -> None:
        stream = torch.cuda.current_stream(self.pool.backend.device).cuda_stream
        if stream != store.stream:
            store.settle()
            store.stream = stream

    def _result(self, status: ResizeStatus, released: int) -> Resize:
        size = self.pool.page_bytes
        used = self._held.used
        return Resize(
            status=status,
            limit_bytes=self.limits.limit * size,
            used_bytes=used * size,
            overage_bytes=max(0, used - self.limits.limit) * size,
            released_bytes=released,
            revision=self.limits.revision,
        )

    def _over(self, pages: int, free: int, total: int, message: str) -> CapacityError:
        size = self.pool.page_bytes
        return CapacityError(
            f"{message} on {self.pool.name}; shorten the text or the batch, let other generations end, or raise the "
            "limit or the budget",
            requested_bytes=pages * size,
            free_bytes=max(0, free) * size,
            total_bytes=total * size,
        )
