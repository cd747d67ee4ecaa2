"""KV cache in blocks, for engines that batch many requests: the sectors of one engine, which come and go by need."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

from elastic.errors import ConfigError, IntegrityError, Overloaded
from elastic.kvcache.storage.pool import OWNER, RETAINED, KVPool
from elastic.kvcache.storage.sector_cap import SectorCap
from elastic.kvcache.storage.sector_space import BlockGroup, Sector, SectorSpace, sector_layer_pages
from elastic.kvcache.storage.usage import SectorUsage
from elastic.memory.backends.streams import finish_queued_work

RETRY_AFTER_S = 5.0
"""For a request that the limit has no room for: somebody lowered it, and may raise it again."""
_MOST_TIMES = 16
"""How many times the sectors that the budget is enough for with all layers there are numbers for at the most: with so
many places in a group, one instance could have the memory of all. Bounds the address space of deep models."""


class BlockMemory(SectorSpace):
    """Sectors of one engine on one place. Guarded by the lock of its KV pool, `lock`.

    Its owner answers under the lock. `promised`: how many more sectors live requests must get, one after another, for
    all to end; `reusable`: how many allocated ones hold only blocks kept for reuse; `give_up_reusable` frees them.

    It begins with all layers here. There are numbers for as many sectors as the budget has room for in a single layer,
    within `_MOST_TIMES`. Where groups have sectors of several sizes, as they can once a layer has left, counts of
    sectors that could be had are too low rather than too high.
    """

    def __init__(
        self,
        kv: KVPool,
        groups: Sequence[BlockGroup],
        *,
        promised: Callable[[], int] = lambda: 0,
        reusable: Callable[[], int] = lambda: 0,
        give_up_reusable: Callable[[int], object] = lambda sectors: None,
    ) -> None:
        sizes, budget = sector_layer_pages(groups, kv.pool.page_bytes), kv.pool.budget_pages
        whole = sizes[0] * len(groups[0].layers)
        sectors = min(budget // min(sizes), _MOST_TIMES * budget // whole)
        if not sectors:
            raise ConfigError(
                f"{kv.pool.name} has {budget} pages of {kv.pool.page_bytes} bytes, too few for {whole}, which blocks "
                "come in; give it more, or smaller pages or block_tokens"
            )
        super().__init__(kv, groups, sectors)
        self.promised = self.owed = promised
        """`owed`: of what is promised, that of requests that live."""
        self.cap = SectorCap()
        """The most sectors that there may be, as `set_cap` says."""
        self.keep_sectors = False
        """Set while layers are copied: no sector is given back, whoever needs pages."""
        self._reusable = reusable
        self._give_up_reusable = give_up_reusable
        self._absent = list(range(self.sectors))  # heap: low ids first
        self.log: list[Sector] | None = None
        """If somebody wants to know: the sectors that were mapped, in order; some may be mapped no more."""
        self._idle: list[dict[int, None]] = [{} for _ in groups]
        self._changes: tuple[dict[Sector, None], dict[Sector, None]] = {}, {}  # mapped and unmapped, as sets in order
        self.usage = SectorUsage(
            used=lambda: self.used_pages,
            check=self.check,
            idle=lambda: self.idle_pages,
            promised=lambda: self.promised() * self.sector_pages,
            owed=lambda: self.owed() * self.sector_pages,
            trim=self.trim,
        )
        try:
            for group in self.groups:
                group.set_layers(group.group.layers)
            kv.join(self.usage)
        except BaseException:
            for group in self.groups:
                group.close()
            raise

    # -- what there is

    @property
    def sectors_in_use(self) -> int:
        """Sectors that live requests need."""
        return self.mapped_count - self._idle_sectors - self._reusable()

    @property
    def used_sectors(self) -> int:
        """The same, counted in sectors of the largest size."""
        return self.used_pages // self.sector_pages if self.sector_pages else self.sectors_in_use

    @property
    def used_pages(self) -> int:
        """Pages in sectors that live requests need."""
        return self.mapped_pages - self.idle_pages

    @property
    def idle_pages(self) -> int:
        """Pages mapped in sectors that no live request needs."""
        idle = sum(len(idle) * g.sector_pages for g, idle in zip(self.groups, self._idle, strict=True))
        return idle + self._reusable() * min(group.sector_pages for group in self.groups)

    @property
    def reusable_limit(self) -> int:
        """Sectors that may stay mapped for reuse alone while memory is free: those of the pool's watermark."""
        return self._sectors_of(int(self.kv.limits.open * self.kv.reclaimer.idle_share))

    @property
    def attainable(self) -> int:
        """Pages that this cache could have if all others on the place were empty, beside the weights of all models."""
        with self.lock:
            return self.kv.pool.free_pages + self.kv.pool.pages_of(OWNER) + self.kv.pool.pages_of(RETAINED)

    @property
    def capacity(self) -> int:
        """Sectors that requests could have at the limit that is in force, with none there, beside other models."""
        return self.cap.within(self.uncapped)

    @property
    def uncapped(self) -> int:
        """The same without the cap."""
        return self._sectors_of(max(0, self.kv.reachable - self.kv.usage.of_others(self.usage)))

    def room(self, *, growing: bool) -> int:
        """Count the sectors that could be allocated now: for requests that live (`growing`), or for new ones."""
        free = self._sectors_of(self.kv.available(growing=growing, asker=self.usage))
        most = self.cap.within(self.sectors, growing=growing)
        return max(0, min(free, most - self.sectors_in_use))

    def require_possible(self, sectors: int, what: str) -> None:
        """Raise `CapacityError` if so many are never to be had, `Overloaded` if not while the limits are as they are.

        `what` needs them, for the message.
        """
        pool, limits, needed = self.kv.pool, self.kv.limits, sectors * self.sector_pages
        attainable = self.attainable
        fits_one = self.sector_pages <= min(limits.maximum, attainable)
        shorten = "shorten it" if fits_one else "have smaller pages or block_tokens"
        if needed > limits.maximum or sectors > self.sectors:
            message = f"{what} never fits the KV cache on {pool.name}; {shorten}, or give the place a larger budget"
            raise pool.shortage(message, needed, free=limits.maximum, total=limits.maximum)
        if needed > attainable:
            message = f"{what} does not fit the KV cache on {pool.name} beside the weights of other models there"
            remedy = f"{shorten}, give the place a larger budget, or each model a place of its own"
            raise pool.shortage(f"{message}; {remedy}", needed, free=attainable, total=limits.maximum)
        if needed > limits.limit:
            size = pool.page_bytes
            raise Overloaded(
                f"{what} needs {needed * size:,} bytes of KV cache on {pool.name}, where the limit is "
                f'{limits.limit * size:,} now: raise it, kv.resize("max") to all there is, or shorten the request',
                retry_after_s=RETRY_AFTER_S,
            )
        if sectors > self.cap.within(sectors):
            raise Overloaded(
                f"{what} needs {sectors} sectors of KV cache, and other places that compute layers of it have room for "
                f"{self.cap.sectors}: try again once they have more, or shorten the request",
                retry_after_s=RETRY_AFTER_S,
            )

    # -- sectors

    def allocate(self, group: int) -> int:
        """Map a sector in all layers of a group. Raises `CapacityError`, and nothing has changed."""
        with self.lock:
            most = self.cap.within(self.sectors, growing=True)
            if not self._idle[group]:
                self._unmap_above(most - 1)
            if self._idle[group]:
                return self._idle[group].popitem()[0]
            size = self.groups[group].sector_pages
            if self.mapped_count >= most:
                raise self.kv.pool.shortage(f"all {most} sectors that there may be are in use", size, free=0)
            self.kv.make_way(size)
            pages = self.kv.pool.allocate(OWNER, size)
            sector = heapq.heappop(self._absent)
            try:
                self.groups[group].map(sector, pages)
            except BaseException:
                heapq.heappush(self._absent, sector)
                self.kv.pool.free(pages)
                raise
            self._note((group, sector), mapped=True)
            if self.log is not None:
                self.log.append((group, sector))
            return sector

    def free(self, group: int, sector: int) -> None:
        """Have a sector be idle: it stays mapped for the next use until its pages are needed elsewhere."""
        with self.lock:
            self._idle[group][sector] = None
            if self.cap.sectors is not None:
                self.kv.reclaimer.tidy(lambda: self._unmap_idle_above(self.cap.within(self.sectors)))

    def trim(self, pages: int) -> int:
        """Give idle sectors back until `pages` pages came free; return how many did."""
        with self.lock:
            smallest = min((group.sector_pages for group in self.groups if group.sector_pages), default=0)
            if not smallest or self.keep_sectors:
                return 0
            self._give_up_reusable(-(-pages // smallest) - self._idle_sectors)
            finish_queued_work(self.kv.device)  # no kernel may still read what is unmapped (law 6)
            freed = 0
            for group, idle in enumerate(self._idle):
                while idle and freed < pages and self.groups[group].sector_pages:
                    freed += self._unmap(group, next(iter(idle)))
            return freed

    def changes(self) -> tuple[tuple[Sector, ...], tuple[Sector, ...]]:
        """Return the sectors (group, sector) that were mapped and unmapped since this was asked before.

        It is what remains: whoever unmaps the latter, then maps the former, has mapped what is mapped here. Asked for
        the first time, it is all that is mapped.
        """
        with self.lock:
            mapped, unmapped = (tuple(changed) for changed in self._changes)
            self._changes = {}, {}
            return mapped, unmapped

    # -- the cap

    def set_cap(self, sectors: int | None) -> None:
        """Have so many sectors at the most. Idle ones above it are given back now, or when they come to be idle.

        A lower one binds new requests. Those that live may get all that they were promised, up to the cap of before;
        `reached_cap` says when none needs more than this one, and from then on there are never more sectors.
        """
        if sectors is not None and sectors < 0:
            raise ConfigError(f"sectors={sectors} must be at least 0, or None for no cap")
        with self.lock:
            self.cap.set(sectors)
            self.reached_cap()
            self.kv.pool.notify()

    def reached_cap(self) -> bool:
        """Return whether there are no more sectors than the cap allows, nor will be for what was promised."""
        with self.lock:
            cap = self.cap
            if cap.sectors is not None and cap.live != cap.sectors:
                self._unmap_above(cap.sectors)
                if max(self.mapped_count, self.sectors_in_use + self.promised()) <= cap.sectors:
                    cap.live = cap.sectors
            return cap.live == cap.sectors

    # -- layers

    def remove_layers(self, layers: Iterable[int]) -> int:
        """Have the KV of layers be here no more: what is in it is lost. Return the pages that came free.

        No step that computes them is in flight, and no tensor over them is used again. Raises `StateError` for one
        that is not here.
        """
        with self.lock:
            chosen = self._require(layers, present=True)
            finish_queued_work(self.kv.device)
            pages = self._take_out(chosen)
            self.kv.pool.free(pages)
            self.kv.note_free()
            return len(pages)

    def add_layers(self, layers: Iterable[int]) -> None:
        """Have the KV of layers be here, with all sectors mapped in them; nothing is said of what is in these.

        Where none is mapped they always can. Else raises `CapacityError` where there is no room for the sectors that
        live requests have or were promised, `StateError` for a layer that is here: nothing has changed then, but for
        idle sectors.
        """
        with self.lock:
            chosen = self._require(layers, present=False)
            self._give_idle_back_for(chosen)
            if self.mapped_count and (lacking := self._lacking_for(chosen)) > 0:
                raise self.kv.pool.shortage(
                    f"the KV cache on {self.kv.pool.name} has no room for layers {sorted(chosen)}; let requests "
                    f"end, or free {lacking} pages",
                    self._needed_for(chosen),
                    self._needed_for(chosen) - lacking,
                )
            self.kv.make_way(self._growth_with(chosen))
            pages = self.kv.pool.allocate(OWNER, self._growth_with(chosen))
            surplus = pages[self._growth_with(chosen) :]  # of sectors that were given back for them
            try:
                self._put_in(chosen, pages[: len(pages) - len(surplus)])
            except BaseException:
                self.kv.pool.free(pages)
                raise
            self.kv.pool.free(surplus)

    def lacking(self, layers: Iterable[int]) -> int:
        """Count the pages that `add_layers` would not find, if nothing more is given back; 0 or less: it would."""
        with self.lock:
            return self._lacking_for(self._require(layers, present=False))

    def check(self) -> None:
        """Recount; raises `IntegrityError`."""
        super().check()
        mapped = [sector for group in self.groups for sector in group.mapped]
        if sorted([*mapped, *self._absent]) != list(range(self.sectors)):
            raise IntegrityError(f"sectors {sorted(mapped)} are mapped, {sorted(self._absent)} absent")
        for group, idle in zip(self.groups, self._idle, strict=True):
            if not idle.keys() <= group.mapped.keys():
                raise IntegrityError(f"sectors {sorted(idle)} are idle, {sorted(group.mapped)} mapped")

    def close(self) -> None:
        """Give everything back; what is in it is lost. Can be called twice."""
        with self.lock:
            finish_queued_work(self.kv.device)
            for group in self.groups:
                group.close()
            for idle in self._idle:
                idle.clear()
            self.kv.leave(self.usage)

    # -- inside, under the lock

    @property
    def _idle_sectors(self) -> int:
        return sum(map(len, self._idle))

    def _sectors_of(self, pages: int) -> int:
        """Count the sectors that pages are enough for, of whichever group."""
        return min(self.sectors, pages // self.sector_pages) if self.sector_pages else self.sectors

    def _unmap_above(self, most: int) -> None:
        """Give sectors back until no more than `most` are mapped, as far as no live request needs them."""
        excess = self.mapped_count - most
        if excess > 0:
            self._give_up_reusable(excess - self._idle_sectors)
            self._unmap_idle_above(most)

    def _unmap_idle_above(self, most: int) -> None:
        """Give idle sectors back until no more than `most` are mapped, as far as there are some."""
        excess = self.mapped_count - most
        if excess > 0 and self._idle_sectors and not self.keep_sectors:
            finish_queued_work(self.kv.device)
            idle = [(group, sector) for group, idle in enumerate(self._idle) for sector in idle]
            for group, sector in idle[:excess]:
                self._unmap(group, sector)

    def _unmap(self, group: int, sector: int) -> int:
        """Give an idle sector back; return its pages."""
        pages = self.groups[group].unmap(sector)
        self.kv.pool.free(pages)
        del self._idle[group][sector]
        heapq.heappush(self._absent, sector)
        self._note((group, sector), mapped=False)
        return len(pages)

    def _note(self, sector: Sector, *, mapped: bool) -> None:
        """Note a change; one that is undone before anybody asks, too: copies may have gone ahead of it."""
        news, gone = self._changes
        if mapped:
            news[sector] = None
        else:
            news.pop(sector, None)
            gone[sector] = None

    def _give_idle_back_for(self, layers: frozenset[int]) -> None:
        """Give idle sectors back as far as they stand in the way of layers that come, then those of others."""
        before = -1
        while (lacking := self._lacking_for(layers)) > 0 and self.mapped_count != before:
            before = self.mapped_count
            self._unmap_above(before - -(-lacking // self._size_with(layers)))
        self.kv.reclaimer.unmap_idle(lacking)

    def _needed_for(self, layers: frozenset[int]) -> int:
        """Count the pages that mapped sectors need in layers that come, and those promised in all."""
        return self._growth_with(layers) + self.promised() * self._size_with(layers)

    def _lacking_for(self, layers: frozenset[int]) -> int:
        """Count the pages of these that are not to be had (below zero: so many more are)."""
        kv = self.kv
        unpromised = kv.limits.maximum - kv.usage.used - kv.usage.idle - kv.usage.promised(but=self.usage)
        return self._needed_for(layers) - min(unpromised, kv.pool.free_pages)
