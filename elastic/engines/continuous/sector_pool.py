"""transformers' pool of cache sectors, over pages: a sector is mapped when it is allocated."""

from __future__ import annotations

from collections.abc import Callable

from transformers.generation.continuous_batching.cache_allocators import CachePool
from transformers.generation.continuous_batching.cache_allocators.cache_pool import RegularTrees

from elastic.kvcache.storage.paged import BlockMemory


class SectorPool(CachePool):  # type: ignore[misc]
    """Guarded by the lock of its memory."""

    def __init__(self, memory: BlockMemory) -> None:
        self.memory = memory
        self.on_change: Callable[[], object] = lambda: None
        """Called when sectors were allocated or given back."""
        self._allocated: list[set[int]] = [set() for _ in memory.groups]
        super().__init__(memory.sectors, len(memory.groups), num_reserved_sectors=0)

    def reset(self) -> None:
        """Every sector holds nothing."""
        for index, sectors in enumerate(self._allocated):
            self._give(index, list(sectors))
        self.free_sectors: list[int] = []  # of the stock pool: sectors are counted by the memory here
        self._free_blocks = [RegularTrees(size) for size in self.blocks_per_sector]

    def allocate_sector(self, index: int) -> None:
        """One more sector for a group of layers. Raises `CapacityError`."""
        sector = self.memory.allocate(index)
        self._allocated[index].add(sector)
        self._free_blocks[index].add_tree(sector)
        self.on_change()

    @property
    def num_free_sectors(self) -> int:
        """Sectors that requests which live could still have."""
        return self.memory.room(growing=True)

    def try_to_free_sectors(self) -> None:
        """Give back the sectors that hold no block any more."""
        with self.memory.lock:
            for index, blocks in enumerate(self._free_blocks):
                self._give(index, blocks.delete_full_trees())

    def allocated(self, index: int) -> int:
        """Sectors of a group."""
        return len(self._allocated[index])

    def _give(self, index: int, sectors: list[int]) -> None:
        for sector in sectors:
            self._allocated[index].discard(sector)
            self.memory.free(index, sector)
        if sectors:
            self.on_change()
