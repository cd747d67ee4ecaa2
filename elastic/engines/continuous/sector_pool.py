"""transformers' pool of cache sectors, over pages: a sector is mapped when it is allocated."""

from __future__ import annotations

from collections.abc import Callable

from transformers.generation.continuous_batching.cache_allocators import CachePool
from transformers.generation.continuous_batching.cache_allocators.cache_pool import RegularTrees

from elastic.kvcache.storage.paged import BlockMemory


class SectorPool(CachePool):  # type: ignore[misc]
    """Guarded by the lock of its memory."""

    def __init__(self, memory: BlockMemory, on_change: Callable[[], object]) -> None:
        self.memory = memory
        self._on_change = on_change  # called when sectors were allocated or given back
        self._allocated: list[set[int]] = [set() for _ in memory.groups]
        super().__init__(memory.sectors, len(memory.groups), num_reserved_sectors=0)

    def reset(self) -> None:
        """Have every sector hold nothing."""
        self._free([list(sectors) for sectors in self._allocated])
        self.free_sectors: list[int] = []  # of the stock pool: sectors are counted by the memory here
        self._free_blocks = [RegularTrees(size) for size in self.blocks_per_sector]

    def allocate_sector(self, index: int) -> None:
        """Allocate one more sector for a group of layers. Raises `CapacityError`."""
        sector = self.memory.allocate(index)
        self._allocated[index].add(sector)
        self._free_blocks[index].add_tree(sector)
        self._on_change()

    @property
    def num_free_sectors(self) -> int:
        """Sectors that requests which live could still have."""
        return self.memory.room(growing=True)

    def try_to_free_sectors(self) -> None:
        """Give back the sectors that hold no block any more."""
        with self.memory.lock:
            self._free([blocks.delete_full_trees() for blocks in self._free_blocks])

    def _free(self, sectors_of_groups: list[list[int]]) -> None:
        for index, sectors in enumerate(sectors_of_groups):
            self._allocated[index].difference_update(sectors)
            for sector in sectors:
                self.memory.free(index, sector)
        if any(sectors_of_groups):
            self._on_change()
