"""Sectors: pages that come and go under all layers at once, whatever the driver does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic import CapacityError
from elastic.kvcache.storage.budget import WeightsShare
from elastic.kvcache.storage.paged import BlockMemory
from elastic.kvcache.storage.pool import KVPool
from elastic.kvcache.storage.sector_space import BlockGroup
from elastic.memory.backends.memfd import MemfdBackend
from elastic.memory.pages.page_pool import PagePool
from support.faulty_backend import FaultyBackend

PAGE = 4096


def memory_of(pages: int = 64, *groups: BlockGroup) -> tuple[BlockMemory, KVPool, FaultyBackend]:
    backend: Any = FaultyBackend(MemfdBackend(PAGE))
    pool = PagePool("cpu#test", backend, pages * PAGE, ready_pages=0)
    kv = KVPool(pool, pages * PAGE, idle_share=1.0, ready_share=0)
    return BlockMemory(kv, groups or (BlockGroup((0, 1), PAGE // 2),)), kv, backend


@pytest.mark.parametrize(
    ("groups", "sector_pages"),
    [
        ([((0, 1), PAGE // 2)], 2),
        ([((0, 1), PAGE * 3)], 6),
        ([((0, 1), 3 * PAGE // 2)], 6),
        ([((0, 2, 4), PAGE), ((1,), PAGE)], 3),
        ([((0, 2), PAGE), ((1, 3, 5), PAGE // 4)], 6),
    ],
)
def test_a_sector_is_whole_blocks_and_whole_pages_in_every_layer(groups: Any, sector_pages: int) -> None:
    memory, kv, _ = memory_of(64, *(BlockGroup(*group) for group in groups))
    assert memory.sector_pages == sector_pages
    for index, (layers, block) in enumerate(groups):
        sector = memory.allocate(index)
        for layer in layers:
            view = memory.groups[index].view(layer, torch.uint8)
            size = memory.blocks_per_sector(index) * block
            view[sector * size : (sector + 1) * size] = layer
            assert view[sector * size + size - 1] == layer
    assert memory.used_pages == sector_pages * len(groups)
    kv.check()
    memory.close()
    assert kv.status().used_bytes == 0


def test_a_freed_sector_is_idle_and_goes_to_whoever_needs_its_pages() -> None:
    memory, kv, _ = memory_of(8)
    sectors = [memory.allocate(0) for _ in range(4)]
    with pytest.raises(CapacityError):
        memory.allocate(0)
    memory.free(0, sectors[0])
    assert (memory.used_pages, memory.idle_pages) == (6, 2)
    assert kv.status().idle_bytes == 2 * PAGE
    assert len(kv.pool.allocate("layer:0", 2)) == 2
    assert (memory.used_pages, memory.idle_pages) == (6, 0)
    assert memory.room(growing=True) == 0
    memory.check()


def test_what_is_promised_cannot_be_claimed() -> None:
    memory, kv, _ = memory_of(16)
    share = WeightsShare(kv)
    share.give_to_cache(0)
    memory.allocate(0)
    memory.promised = lambda: 5
    assert not share.take_from_cache(5)
    assert share.shortfall(5) == 1
    assert share.take_from_cache(4)
    assert kv.limits.maximum == 12


def test_pages_of_other_models_on_the_place_are_no_capacity() -> None:
    memory, kv, _ = memory_of(16)
    memory.allocate(0)
    assert memory.capacity == 8
    weights = kv.pool.allocate("layer:0", 6)
    assert memory.capacity == 5
    assert kv.status().capacity_bytes == 10 * PAGE
    memory.require_possible(5, "a request")
    with pytest.raises(CapacityError, match=r"a request does not fit .* beside the weights of other models"):
        memory.require_possible(6, "a request")
    kv.pool.free(weights)
    other = BlockMemory(KVPool(kv.pool, 16 * PAGE, idle_share=1.0, ready_share=0), [BlockGroup((0,), PAGE)])
    for _ in range(4):
        other.allocate(0)
    assert memory.capacity == 6
    memory.require_possible(8, "a request that can wait until the other cache is empty")
    other.close()
    assert memory.capacity == 8


def test_blocks_that_are_larger_than_what_is_left_are_not_told_to_have_shorter_requests() -> None:
    memory, kv, _ = memory_of(16, BlockGroup((0, 1), 9 * PAGE))
    with pytest.raises(CapacityError, match=r"never fits .*; have smaller pages or block_tokens, or give"):
        memory.require_possible(1, "a request")
    memory.remove_layers([1])
    memory.require_possible(1, "a request")
    kv.pool.allocate("layer:0", 8)
    with pytest.raises(CapacityError, match=r"does not fit .*; have smaller pages or block_tokens, give"):
        memory.require_possible(1, "a request")


def test_a_lower_limit_is_for_new_requests_those_that_live_may_grow() -> None:
    memory, kv, _ = memory_of(16)
    memory.allocate(0)
    assert kv.resize(4 * PAGE).status == "applied"
    assert (memory.room(growing=False), memory.room(growing=True)) == (1, 7)


@pytest.mark.parametrize(("call", "nth"), [("create", 1), ("map", 1), ("map", 2)])
def test_a_fault_of_the_driver_leaves_an_allocation_undone(call: str, nth: int) -> None:
    memory, kv, backend = memory_of()
    kept = memory.allocate(0)
    view = memory.groups[0].view(1, torch.uint8)
    view[kept * PAGE] = 7
    backend.fail(call, nth)
    with pytest.raises(CapacityError, match="injected"):
        memory.allocate(0)
    assert backend.failures == 1
    kv.check()
    assert memory.used_pages == 2
    assert memory.allocate(0) != kept
    assert view[kept * PAGE] == 7
    kv.check()


@pytest.mark.parametrize("nth", [1, 2])
def test_a_fault_while_trimming_loses_no_page(nth: int) -> None:
    memory, kv, backend = memory_of()
    memory.free(0, memory.allocate(0))
    backend.fail("unmap", nth)
    with pytest.raises(CapacityError, match="injected"):
        memory.trim(2)
    kv.check()
    assert memory.idle_pages == 2
    assert memory.trim(2) == 2
    kv.check()
