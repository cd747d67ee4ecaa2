"""KV cache in blocks, for engines that batch many requests: one range of address space per layer, mapped by sectors.

A block holds some tokens of one request, in each layer of a group (all layers of one kind of attention). Sectors are
what pages come and go in: as many blocks as make whole pages in every layer. All groups have sectors of the same size,
so a sector that one no longer needs another may have (docs/design.md).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from elastic.errors import IntegrityError, Overloaded
from elastic.kvcache.storage.pool import OWNER, KVPool
from elastic.memory.backends.streams import finish_queued_work
from elastic.memory.virtual_range import VirtualRange, map_all, unmap_all

RETRY_AFTER_S = 5.0
"""For a request that the limit has no room for: somebody lowered it, and may raise it again."""


@dataclass(frozen=True)
class BlockGroup:
    """Layers whose caches grow together."""

    layers: tuple[int, ...]
    block_bytes: int
    """Of one block in one layer: keys and values."""


class GroupRanges:
    """The memory of one group: in each layer the same sectors are mapped."""

    def __init__(self, kv: KVPool, group: BlockGroup, sectors: int, layer_pages: int) -> None:
        self.group = group
        self.layer_pages = layer_pages
        self.mapped: dict[int, None] = {}  # sector ids, as a set in order
        readable = kv.device.type == "cpu"  # so that printing a tensor over it does not crash
        self.ranges = [VirtualRange(kv.pool, sectors * layer_pages, readable_gaps=readable) for _ in group.layers]
        nbytes = sectors * layer_pages * kv.pool.page_bytes
        self._storages = [layer_range.storage(0, nbytes, lambda: None) for layer_range in self.ranges]

    def view(self, layer: int, dtype: torch.dtype) -> torch.Tensor:
        """View all address space of a layer as [elements] of `dtype`. Only mapped sectors may be written."""
        return self._storages[self.group.layers.index(layer)].tensor(dtype)

    def map(self, sector: int, pages: Sequence[int]) -> None:
        """Map a sector in every layer, or in none. Raises `CapacityError`."""
        count = self.layer_pages
        map_all(
            (layer_range, sector * count, pages[i * count : (i + 1) * count])
            for i, layer_range in enumerate(self.ranges)
        )
        self.mapped[sector] = None

    def unmap(self, sector: int) -> list[int]:
        """Take a sector out of every layer, or of none; return its pages."""
        pages = unmap_all((layer_range, sector * self.layer_pages, self.layer_pages) for layer_range in self.ranges)
        del self.mapped[sector]
        return pages

    def pages_of(self, sector: int) -> tuple[int, ...]:
        """Return the pages of a mapped sector, those of the first layer first."""
        slots = range(sector * self.layer_pages, (sector + 1) * self.layer_pages)
        return tuple(layer_range.slots[slot] for layer_range in self.ranges for slot in slots)

    def close(self) -> None:
        """Give everything back."""
        for storage in self._storages:
            storage.drop()
        for layer_range in self.ranges:
            layer_range.close()
        self.mapped.clear()


class BlockMemory:
    """Sectors of one engine on one place. Guarded by the lock of its KV pool, `lock`.

    Its owner answers under the lock. `promised`: how many more sectors live requests must get, one after another, for
    all to end; `reusable`: how many allocated ones hold only blocks kept for reuse; `give_up_reusable` frees them.
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
        self.kv = kv
        self.lock = kv.lock
        self.promised = promised
        self._reusable = reusable
        self._give_up_reusable = give_up_reusable
        page_bytes = kv.pool.page_bytes
        # the fewest pages that hold whole blocks, and whole pages, in every layer of every group
        group_bytes = (len(group.layers) * math.lcm(group.block_bytes, page_bytes) for group in groups)
        self.sector_pages = math.lcm(*group_bytes) // page_bytes
        self.sector_bytes = self.sector_pages * page_bytes
        self.sectors = kv.pool.budget_pages // self.sector_pages
        self.groups = [GroupRanges(kv, g, self.sectors, self.sector_pages // len(g.layers)) for g in groups]
        self._absent = list(range(self.sectors))  # heap: low ids first
        self.log: list[tuple[int, int, tuple[int, ...]]] | None = None
        """If somebody wants to know: the sectors that were mapped, as (group, sector, pages), in order."""
        self._idle: list[dict[int, None]] = [{} for _ in groups]
        kv.join(self)

    @property
    def used_sectors(self) -> int:
        """Sectors that live requests need."""
        mapped = sum(len(group.mapped) for group in self.groups)
        return mapped - self.idle_pages // self.sector_pages

    @property
    def used_pages(self) -> int:
        """Pages in sectors that live requests need."""
        return self.used_sectors * self.sector_pages

    @property
    def idle_pages(self) -> int:
        """Pages mapped in sectors that no live request needs."""
        return (sum(map(len, self._idle)) + self._reusable()) * self.sector_pages

    @property
    def promised_pages(self) -> int:
        """Pages that must remain to be had beside those in use."""
        return self.promised() * self.sector_pages

    @property
    def reusable_limit(self) -> int:
        """Sectors that may stay mapped for reuse alone while memory is free: those of the pool's watermark."""
        return int(self.kv.limits.open * self.kv.reclaimer.idle_share) // self.sector_pages

    def blocks_per_sector(self, group: int) -> int:
        """Count the blocks that a sector has in each layer of a group."""
        ranges = self.groups[group]
        return ranges.layer_pages * self.kv.pool.page_bytes // ranges.group.block_bytes

    def room(self, *, growing: bool) -> int:
        """Count the sectors that could be allocated now: for requests that live (`growing`), or for new ones."""
        return self.kv.available(growing=growing) // self.sector_pages

    def require_possible(self, sectors: int, what: str) -> None:
        """Raise `CapacityError` if so many are never to be had, `Overloaded` if not while the limit is as it is.

        `what` needs them, for the message.
        """
        pool, limits, needed = self.kv.pool, self.kv.limits, sectors * self.sector_pages
        if needed > limits.maximum:
            message = f"{what} never fits the KV cache on {pool.name}; shorten it, or give the place a larger budget"
            raise pool.shortage(message, needed, free=limits.maximum, total=limits.maximum)
        if needed > limits.limit:
            size = pool.page_bytes
            raise Overloaded(
                f"{what} needs {needed * size:,} bytes of KV cache on {pool.name}, where the limit is "
                f'{limits.limit * size:,} now: raise it, kv.resize("max") to all there is, or shorten the request',
                retry_after_s=RETRY_AFTER_S,
            )

    def allocate(self, group: int) -> int:
        """Map a sector in all layers of a group. Raises `CapacityError`, and nothing has changed."""
        with self.lock:
            if self._idle[group]:
                return self._idle[group].popitem()[0]
            self.kv.make_way(self.sector_pages)
            pages = self.kv.pool.allocate(OWNER, self.sector_pages)
            sector = heapq.heappop(self._absent)
            try:
                self.groups[group].map(sector, pages)
            except BaseException:
                heapq.heappush(self._absent, sector)
                self.kv.pool.free(pages)
                raise
            if self.log is not None:
                self.log.append((group, sector, tuple(pages)))
            return sector

    def free(self, group: int, sector: int) -> None:
        """Have a sector be idle: it stays mapped for the next use until its pages are needed elsewhere."""
        with self.lock:
            self._idle[group][sector] = None

    def trim(self, pages: int) -> int:
        """Give idle sectors back until `pages` pages came free; return how many did."""
        with self.lock:
            self._give_up_reusable(-(-pages // self.sector_pages) - sum(map(len, self._idle)))
            finish_queued_work(self.kv.device)  # no kernel may still read what is unmapped (law 6)
            freed = 0
            for group, idle in zip(self.groups, self._idle, strict=True):
                while idle and freed < pages:
                    sector = next(iter(idle))
                    self.kv.pool.free(group.unmap(sector))
                    del idle[sector]
                    heapq.heappush(self._absent, sector)
                    freed += self.sector_pages
            return freed

    def check(self) -> None:
        """Recount; raises `IntegrityError`."""
        mapped = [sector for group in self.groups for sector in group.mapped]
        if sorted([*mapped, *self._absent]) != list(range(self.sectors)):
            raise IntegrityError(f"sectors {sorted(mapped)} are mapped, {sorted(self._absent)} absent")
        for group, idle in zip(self.groups, self._idle, strict=True):
            for layer_range in group.ranges:
                shown = len(layer_range.slots)
                if shown != len(group.mapped) * group.layer_pages:
                    raise IntegrityError(f"a layer shows {shown} pages of {len(group.mapped)} sectors")
            if not idle.keys() <= group.mapped.keys():
                raise IntegrityError(f"sectors {sorted(idle)} are idle, {sorted(group.mapped)} mapped")

    def close(self) -> None:
        """Give everything back; what is in it is lost. Can be called twice."""
        with self.lock:
            finish_queued_work(self.kv.device)
            for group, idle in zip(self.groups, self._idle, strict=True):
                group.close()
                idle.clear()
            self.kv.leave(self)
