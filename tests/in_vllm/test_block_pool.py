"""The connector's books against vLLM's own block pool: the machine of the unit tests, and what a stub cannot show."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from elastic.engines.vllm.kv.capacity import BlockCapacity
from elastic.engines.vllm.kv.moves import move_blocks
from support.vllm_engine.blocks import CapacityMachine


class HashingBlockPool(BlockPool):
    """vLLM's pool, whose blocks are cached under a text."""

    def set_hash(self, block: Any, key: str) -> None:
        self._insert_block_hash(make_block_hash_with_group_id(BlockHash(key.encode()), 0), block, num_tokens=1)


def make_pool(blocks: int) -> HashingBlockPool:
    return HashingBlockPool(blocks, enable_caching=True, hash_block_size=1)


class RealCapacityMachine(CapacityMachine):
    """The same rules on vLLM's pool."""

    make_pool = staticmethod(make_pool)


TestRealCapacity = RealCapacityMachine.TestCase
TestRealCapacity.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def cached(pool: BlockPool, key: str) -> Any:
    hits = pool.get_cached_block(BlockHash(key.encode()), [0])
    return hits[0] if hits else None


def test_vllm_counts_its_use_of_what_may_be_used() -> None:
    capacity = BlockCapacity(make_pool(32))
    capacity.set_limit(9)
    assert capacity.pool.get_usage() == 0
    capacity.pool.get_new_blocks(4)
    assert capacity.pool.get_usage() == 0.5
    assert capacity.pool.free_block_queue.num_free_blocks == 4


def test_an_idle_pool_still_resets_its_prefix_cache() -> None:
    pool = make_pool(32)
    capacity = BlockCapacity(pool)
    capacity.set_limit(9)
    (block,) = pool.get_new_blocks(1)
    pool.set_hash(block, "text")
    pool.free_blocks([block])
    assert pool.reset_prefix_cache()
    assert cached(pool, "text") is None


def test_a_cached_prefix_is_found_where_it_was_moved() -> None:
    pool = make_pool(32)
    capacity = BlockCapacity(pool)
    capacity.set_limit(32)
    blocks = pool.get_new_blocks(31)
    pool.set_hash(blocks[30], "text")
    pool.free_blocks(blocks)
    capacity.set_limit(8, evict=False)
    ((source, target),) = move_blocks(capacity, [], set()).copies
    assert (source, cached(pool, "text").block_id) == (31, target)
    assert target < 8
    capacity.check()
    pool.touch([pool.blocks[target]])


def test_a_cached_prefix_is_evicted_where_nothing_moves() -> None:
    pool = make_pool(32)
    capacity = BlockCapacity(pool)
    capacity.set_limit(32)
    blocks = pool.get_new_blocks(31)
    pool.set_hash(blocks[30], "text")
    pool.free_blocks(blocks)
    capacity.set_limit(8)
    assert cached(pool, "text") is None
    assert capacity.usable == 7
