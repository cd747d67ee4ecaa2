"""The KV cache of one instance on one place: a limit that moves, stores that live, and stores kept for the next cache.

A limit binds new caches. Caches that lived when it fell may grow past it, up to the maximum; what they hold above it
is the overage, and the shrink is deferred until they end. Nothing that a cache holds is ever discarded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from elastic.errors import CapacityError, IntegrityError, StateError
from elastic.kvcache.storage.layer_store import LayerStore, StoreState
from elastic.kvcache.storage.layout import StoreGeometry
from elastic.kvcache.storage.reclaim import Reclaimer
from elastic.kvcache.storage.usage import KVLimits, PoolUsage, SectorUsage
from elastic.memory.backends.peers import reachable
from elastic.memory.backends.streams import synchronize
from elastic.memory.pages.background import janitor
from elastic.memory.pages.finalizers import call_at_death, cancel
from elastic.memory.pages.page_pool import PagePool
from elastic.types import KVStatus, Resize, ResizeStatus

OWNER = "kv"
RETAINED = "retained"
IDLE_SHARE = 0.25
READY_SHARE = 1 / 32


class KVPool:
    """Stores of one instance on one place. Thread-safe, under the mapping lock of the page pool.

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
        self.device = pool.device
        self.lock = pool.mapping_lock
        maximum = maximum_bytes // pool.page_bytes
        self.limits = KVLimits(maximum, limit=maximum, floor=maximum)
        self.host_offload = host_offload
        self.ready_share = ready_share
        self.usage = PoolUsage()
        self.reclaimer = Reclaimer(pool, self.usage, idle_share)
        self.on_settled: Callable[[Resize], None] = lambda result: None
        """Called with a deferred shrink that is over. Under the lock: it may take none."""
        self.engine_usage: Callable[[], tuple[int, int]] | None = None
        """Bytes used and bytes of capacity, where an engine's scheduler in another process hands out what is mapped."""
        self.reserved = 0
        """Pages that nobody else gets, for sectors that another instance may map here (`Reservation`)."""
        self.closed = False
        self._deferred_limit: int | None = None  # at which a deferred shrink is over
        self.ended: deque[tuple[LayerStore, int]] = deque()
        """(store, the lease that ended; 0: its last view went): for `retire_ended`, and appended to without a lock."""
        pool.reclaimers.append(self.reclaim)
        pool.claims[self] = lambda: self.usage.owed - self.usage.idle

    @property
    def unreserved(self) -> int:
        """The limit for new caches, less what is reserved: so much may be mapped besides."""
        return max(0, self.limits.open - self.reserved)

    @property
    def reachable(self) -> int:
        """The limit for new caches, or less: other models on the place may have pages below it."""
        return min(self.limits.open, self.usage.used + self.usage.idle + self.reserved + self.pool.free_pages)

    # -- what caches and engines do

    def lease(
        self, keys: StoreGeometry, values: StoreGeometry, user: object, *, epoch: int | None = None
    ) -> StoreLease:
        """Lease a store: an idle one of these shapes, or a new one. It returns when `user`, a cache layer, dies.

        `epoch` is how often the limit had fallen when the layer's contents were begun; None: they begin now.
        """
        with self.lock:
            self.retire_ended()
            if self.closed:
                raise StateError("the model was unwrapped; build a new cache")
            store = self.usage.adopt((keys, values), self.unreserved - self.usage.used)
            if store is None:
                store = new = LayerStore(self.pool, (keys, values), lambda: self._note_last_view(new))
                self.usage.stores.append(store)
            store.begin(self.limits.shrinks if epoch is None else epoch)
            return StoreLease(self, store, user)

    def grow(self, store: LayerStore, start: int, stop: int) -> None:
        """Map pages for the tokens [start, stop), under the lock. Raises `CapacityError` with the store as it was."""
        self.retire_ended()
        missing, used = sum(buffer.missing(start, stop) for buffer in store.buffers), self.usage.used
        limit = self.limits.maximum if self.limits.shrinks > store.limit_epoch else self.limits.open
        limit -= self.reserved
        if used + missing > limit:
            used -= self.reclaimer.trim_live(but=store)
        if used + missing > limit:
            raise self._over_limit("the KV cache has reached its limit", missing, limit - used, limit)
        self.make_way(missing)
        store.extend(start, stop, OWNER)
        next_growth = sum(geometry.rows for geometry in store.geometries)  # a page for each row
        self.pool.ready_pages = min(next_growth, int(self.usage.used * self.ready_share))

    def make_way(self, pages: int) -> None:
        """Give idle pages back where they and `pages` more would be above the limit."""
        with self.lock:
            needed = self.usage.used + pages
            if (excess := needed + self.usage.idle - max(self.unreserved, needed)) > 0:
                self.reclaimer.unmap_idle(excess)

    def available(self, *, growing: bool, asker: SectorUsage | None = None) -> int:
        """Count the pages to be had beside those in use: for requests that live (`growing`), or for new ones.

        What was promised is not to be had, but by the `asker` what was promised to it.
        """
        with self.lock:
            self.retire_ended()
            limit = self.limits.maximum if growing else self.limits.open
            unpromised = limit - self.usage.used - self.usage.promised(but=asker)
            return max(0, min(unpromised, self.usage.beside_others(self.pool, self, growing=growing)))

    def require_available(self, pages: int) -> None:
        """Raise `CapacityError` where so many more cannot be promised to somebody."""
        with self.lock:
            if pages > (free := self.available(growing=False)):
                raise self._over_limit("the KV cache has no room to promise", pages, free, self.limits.open)

    def join(self, sectors: SectorUsage) -> None:
        """Count the sectors of an engine as part of this cache."""
        with self.lock:
            if self.closed:
                raise StateError("the model was unwrapped; make a new engine")
            self.usage.sectors.append(sectors)

    def leave(self, sectors: SectorUsage) -> None:
        """Undo `join`. Can be called twice."""
        with self.lock:
            if sectors in self.usage.sectors:
                self.usage.sectors.remove(sectors)
                self.pool.notify()

    # -- what the runtime does

    def resize(self, limit_bytes: int | None, revision: int | None = None) -> Resize:
        """Move the limit; None: to the maximum. Raises `CapacityError` above that; then nothing has changed."""
        with self.lock:
            self.retire_ended()
            limit = self._pages_of_limit(limit_bytes, revision)
            if limit is None:
                return self._result("stale")
            before = self.limits, self._deferred_limit
            self.limits = self.limits.with_limit(limit, revision)
            created = self.pool.backend.created
            try:
                self.reclaimer.fit(self.unreserved)
            except BaseException:
                self.limits, self._deferred_limit = before
                raise
            self._deferred_limit = limit if self.usage.used + self.reserved > limit else None
            released = max(0, created - self.pool.backend.created)
            return self._result("applied" if self._deferred_limit is None else "deferred", released)

    def dry_run_resize(self, limit_bytes: int | None, revision: int | None = None) -> tuple[ResizeStatus, int, int]:
        """Predict what `resize` would do: its status, the pages given back, the pages over the limit."""
        with self.lock:
            self.retire_ended()
            limit = self._pages_of_limit(limit_bytes, revision)
            if limit is None:
                return "stale", 0, 0
            used, idle, live = self.usage.used, self.usage.idle, self.usage.stores_in(StoreState.LIVE)
            spare = sum(store.spare() for store in live if not store.is_shown_outside())
            unreserved = max(0, limit - self.reserved)
            unmapped = max(0, min(used + idle - unreserved, idle + spare))
            kept_ready = self.reclaimer.ready_pages(unreserved, used + idle - unmapped)
            released = max(0, len(self.pool.cached) + unmapped - kept_ready)
            kept = max(0, used + self.reserved - spare)
            return ("applied" if kept <= limit else "deferred"), released, max(0, kept - limit)

    def reclaim(self, pages: int) -> int:
        """Free about `pages` pages: idle stores, the longest idle first, then spare pages of live ones."""
        with self.lock:
            self.retire_ended()
            return self.reclaimer.unmap(pages)

    def trim(self) -> int:
        """Give every page that no cache needs back to the system; return bytes."""
        with self.lock:
            self.retire_ended()
            created = self.pool.backend.created
            self.reclaimer.unmap(self.usage.used + self.usage.idle)
            self.pool.unmap_idle()
            self.pool.trim()
            return (created - self.pool.backend.created) * self.pool.page_bytes

    def retire_ended(self) -> None:
        """Retire the stores whose cache layer died or gave them up, or whose last view went; fit what is left."""
        with self.lock:
            if not self.ended and not self.reclaimer.unfinished:
                return
            while self.ended:
                store, lease = self.ended.popleft()
                if store.state is StoreState.RETAINED or (store.state is StoreState.LIVE and lease == store.lease):
                    self._retire(store)
            self.settle()

    def settle(self) -> None:
        """Fit what is mapped under the limit and end a deferred shrink: caches or sectors were given back."""
        with self.lock:
            self.reclaimer.tidy(lambda: self.reclaimer.fit(self.unreserved))
            self.note_free()

    def note_free(self) -> None:
        """End a deferred shrink if enough came free, and tell those who wait for pages."""
        with self.lock:
            if self._deferred_limit is not None and self.usage.used + self.reserved <= self._deferred_limit:
                self._deferred_limit = None
                self.on_settled(self._result("applied"))
            self.pool.notify()

    def status(self) -> KVStatus:
        """Return a snapshot."""
        with self.lock:
            self.retire_ended()
            size, engine = self.pool.page_bytes, self.engine_usage
            used_bytes, capacity_bytes = engine() if engine else (self.usage.used * size, self.reachable * size)
            return KVStatus(
                place=self.pool.name,
                capacity_bytes=capacity_bytes,
                limit_bytes=self.limits.limit * size,
                maximum_bytes=self.limits.maximum * size,
                used_bytes=used_bytes,
                idle_bytes=max(0, (self.usage.used + self.usage.idle) * size - used_bytes),
                retained_bytes=self.usage.pages_in(StoreState.RETAINED) * size,
                revision=self.limits.revision,
            )

    def check(self) -> None:
        """Recount; raises `IntegrityError`."""
        with self.lock:
            self.retire_ended()
            for store in self.usage.stores:
                for buffer in store.buffers:
                    expected = buffer.geometry.rows * (buffer.stop - buffer.first)
                    shown = len(buffer.range.slots)
                    if shown != expected:
                        raise IntegrityError(f"a buffer shows {shown} pages, its window says {expected}")
                if store.spare() < 0:
                    raise IntegrityError(f"a store has {store.pages} pages, {-store.spare()} too few for its tokens")
            for sectors in self.usage.sectors:
                sectors.check()
            self.pool.check()

    def close(self) -> None:
        """Give back what is not shown outside; the rest goes when its last view does."""
        with self.lock:
            self.closed = True
            self.limits = KVLimits(0, limit=0, floor=0)
            if self.reclaim in self.pool.reclaimers:
                self.pool.reclaimers.remove(self.reclaim)
            self.pool.claims.pop(self, None)
            self.retire_ended()
            self.reclaimer.fit(0)

    # -- inside, under the lock

    def _note_end(self, store: LayerStore, lease: int) -> None:
        """Called by finalizers, so from anywhere: takes no lock."""
        self.ended.append((store, lease))
        janitor.submit(self.retire_ended)

    def _note_last_view(self, store: LayerStore) -> None:
        """Called by finalizers, so from anywhere: takes no lock."""
        if self.device.type == "cuda":
            janitor.submit(lambda: self._retire_shown(store))
        else:
            self._note_end(store, 0)

    def _retire_shown(self, store: LayerStore) -> None:
        """Retire a store whose last view went, when the work is over that tensors outside have queued on any stream."""
        with self.lock:
            retained = store.state is StoreState.RETAINED
        if retained:
            synchronize(self.device)
            self._note_end(store, 0)

    def _retire(self, store: LayerStore) -> None:
        """Have a store without a cache be retained while tensors outside show it, else idle."""
        store.keep(0, 0)
        pages = [page for buffer in store.buffers for page in buffer.range.slots.values()]
        if not store.is_shown_outside():
            if store.state is StoreState.RETAINED:
                self.pool.reassign(pages, OWNER)
            store.state = StoreState.IDLE
            self.usage.stores.remove(store)
            self.usage.stores.append(store)  # the last one that became idle
        elif store.state is StoreState.LIVE:
            store.state = StoreState.RETAINED
            self.pool.reassign(pages, RETAINED)

    def _pages_of_limit(self, limit_bytes: int | None, revision: int | None) -> int | None:
        """Return a limit in pages; None if its revision is stale. Raises `CapacityError` above the maximum."""
        if revision is not None and revision <= self.limits.revision:
            return None
        limit = maximum = self.limits.maximum
        if limit_bytes is not None and (limit := limit_bytes // self.pool.page_bytes) > maximum:
            what = f"the KV limit is above the maximum on {self.pool.name}; set a lower one, or raise the budget"
            raise self.pool.shortage(what, limit, maximum - self.usage.used, maximum)
        return limit

    def _over_limit(self, what: str, pages: int, free: int, total: int) -> CapacityError:
        message = f"{what} on {self.pool.name}; shorten the text or the batch, let other generations end, or raise the "
        return self.pool.shortage(f"{message}limit or the budget", pages, free, total)

    def _result(self, status: ResizeStatus, released_pages: int = 0) -> Resize:
        size, used = self.pool.page_bytes, self.usage.used
        return Resize(
            status=status,
            limit_bytes=self.limits.limit * size,
            used_bytes=used * size,
            overage_bytes=max(0, used + self.reserved - self.limits.limit) * size,
            released_bytes=released_pages * size,
            revision=self.limits.revision,
        )


class StoreLease:
    """A store in use by one cache layer. Thread-safe, under the lock of its KV pool."""

    def __init__(self, pool: KVPool, store: LayerStore, user: object) -> None:
        """It ends with `user`, too."""
        self.pool = pool
        self.store = store
        self.max_tokens = store.geometries[0].max_tokens
        """For which there is address space."""
        self._lock = pool.lock
        self._number = store.lease
        self._user = call_at_death(user, pool._note_end, store, store.lease)

    def write(
        self, keys: torch.Tensor, values: torch.Tensor, keep: int, read: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values so that they end at token `stop`; return views of the tokens [read, stop).

        keys, values: [batch, kv_heads, new, head_dim], each of the shape and dtype of the store. Returns
        [batch, kv_heads, stop - read, head_dim]; `read` is not behind the first new token. Tokens before `keep` may be
        given back. Raises `CapacityError`.
        """
        start = stop - keys.shape[2]
        key_buffer, value_buffer = self.store.buffers
        with self._lock:
            self.hold(keep, stop)
            all_keys, all_values = key_buffer.view(read, stop), value_buffer.view(read, stop)
        if keys.device != all_keys.device:
            keys, values = reachable(keys, all_keys.device), reachable(values, all_keys.device)
        all_keys[:, :, start - read :].copy_(keys)
        all_values[:, :, start - read :].copy_(values)
        return all_keys, all_values

    def views(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """View the keys and values of the tokens [start, stop), [batch, kv_heads, stop - start, head_dim]."""
        keys, values = self.store.buffers
        with self._lock:
            return keys.view(start, stop), values.view(start, stop)

    def hold(self, start: int, stop: int) -> None:
        """Have the tokens [start, stop) mapped, and nothing given away inside them until the next call.

        Raises `CapacityError` with the store as it was.
        """
        store = self.store
        with self._lock:
            if start < store.first_mapped or stop > store.stop_mapped:
                self.pool.grow(store, start, stop)
            if store.stream is not None:  # on a CPU all is in order
                store.use_on_current_stream()
            store.keep(start, stop)
            if start >= store.spare_from:
                self.pool.reclaimer.tidy(store.slide)

    def end(self) -> int:
        """Give the store up; return the bytes that tensors outside still show. Can be called twice."""
        with self._lock:
            if self.store.lease != self._number:
                return 0
            cancel(self._user)
            self.pool.ended.append((self.store, self._number))
            self.pool.retire_ended()
            return self.store.pages * self.pool.pool.page_bytes if self.store.state is StoreState.RETAINED else 0
