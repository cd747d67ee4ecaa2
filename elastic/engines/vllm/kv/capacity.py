"""How many blocks of vLLM's block pool may be used: the others are withheld from its free queue.

The pool is made for the most blocks that there can ever be. A block that is withheld is in no queue and has no cached
prefix; one that a request holds cannot be withheld before it is freed or moved.
"""

from __future__ import annotations

from typing import Any

from elastic.errors import IntegrityError


class BlockCapacity:
    """The usable blocks of a pool: those with ids below `limit`, and those above it that are still in use.

    Block 0 is vLLM's null block, in use for ever. `pool` is vLLM's `BlockPool`; what is used of it is in
    `support.PROBES`, and `StubBlockPool` of the tests has it.
    """

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.limit = len(pool.blocks)
        self.withheld: set[int] = set()
        self.leaving: set[int] = set()
        """Ids from the limit on that are not withheld yet."""
        self.set_limit(1)

    @property
    def usable(self) -> int:
        """Blocks that requests may have, or still have."""
        return int(self.pool.num_gpu_blocks - 1)

    @property
    def used(self) -> int:
        """Blocks that requests have."""
        return int(self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks())

    @property
    def end(self) -> int:
        """The number after the last block that is not withheld."""
        return max(self.leaving, default=self.limit - 1) + 1

    def set_limit(self, blocks: int, *, evict: bool = True) -> None:
        """Publish the blocks below `blocks`, or begin to withdraw those from there on, as `withdraw_freed` does.

        New ones have no contents worth keeping, so they are the first to be taken, low ids before high ones.
        """
        before, self.limit = self.limit, max(1, blocks)
        if self.limit == before and not self.leaving:  # in nearly every step
            return
        self.leaving = {b for b in (*self.leaving, *range(self.limit, before)) if b >= self.limit} - self.withheld
        published = [b for b in range(before, self.limit) if b in self.withheld]
        self.withheld.difference_update(published)
        self.pool.free_block_queue.prepend_n([self.pool.blocks[b] for b in published])
        self.withdraw_freed(evict=evict)

    def withdraw_freed(self, *, evict: bool = True) -> None:
        """Withhold the blocks from the limit on that are free by now; without `evict`, cached prefixes may stay."""
        for block in [self.pool.blocks[b] for b in sorted(self.leaving)]:
            if block.ref_cnt == 0 and (evict or block.block_hash is None):
                self.withhold_free(block)
        self.pool.num_gpu_blocks = len(self.pool.blocks) - len(self.withheld)  # what vLLM's use of the cache is of

    def forget_contents(self) -> None:
        """Take all blocks out of the prefix cache; requests that have some go on with them."""
        for block in self.pool.blocks:
            if block.block_hash is not None:
                self.pool._maybe_evict_cached_block(block)

    def take(self) -> Any | None:
        """Allocate the free block below the limit that was used longest ago; None if there is none."""
        while self.pool.get_num_free_blocks():
            block = self.pool.get_new_blocks(1)[0]
            if block.block_id < self.limit:
                return block
            self.withhold_unused(block)
        return None

    def withhold_free(self, block: Any) -> None:
        """Withhold a free block; it goes from the prefix cache, and a connector that still reads it is told."""
        self.pool._maybe_evict_cached_block(block)
        watchers = getattr(self.pool, "_reuse_watchers", None)
        if watchers and block.block_id in watchers:
            watchers.pop(block.block_id)(block)
        self.pool.free_block_queue.remove(block)
        self.withhold_unused(block)

    def withhold_unused(self, block: Any) -> None:
        """Withhold a block in no queue, to which nothing refers any more."""
        block.ref_cnt = 0
        self.leaving.discard(block.block_id)
        self.withheld.add(block.block_id)
        self.pool.num_gpu_blocks -= 1

    def check(self) -> None:
        """Recount; raises `IntegrityError`."""
        free = {block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()}
        idle = {b.block_id for b in self.pool.blocks[1:] if b.ref_cnt == 0}
        if free & self.withheld or free | self.withheld != idle:
            lost, double = idle ^ (free | self.withheld), free & self.withheld
            raise IntegrityError(f"blocks {sorted(lost)} are lost, {sorted(double)} both free and withheld")
        if len(free) != self.pool.get_num_free_blocks():
            raise IntegrityError(f"{len(free)} blocks are free, the queue counts {self.pool.get_num_free_blocks()}")
        if self.pool.num_gpu_blocks != len(self.pool.blocks) - len(self.withheld):
            counted, withheld = self.pool.num_gpu_blocks, len(self.withheld)
            raise IntegrityError(
                f"the pool counts {counted} blocks of {len(self.pool.blocks)}, {withheld} are withheld"
            )
