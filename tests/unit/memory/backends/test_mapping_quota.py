"""Mappings are counted as Linux makes them, and a shortage of them is an error here before it is one there."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic import CapacityError, StateError
from elastic.engines.vllm.kv.sectors import KVSectors
from elastic.kvcache.layers.elastic_layer import ElasticLayer
from elastic.kvcache.manager import KVMemory
from elastic.kvcache.storage.layout import HEAD_MAJOR
from elastic.kvcache.storage.paged import BlockMemory
from elastic.kvcache.storage.pool import KVPool
from elastic.kvcache.storage.sector_space import BlockGroup
from elastic.memory.backends.mapping_quota import MappingQuota
from elastic.memory.backends.memfd import MemfdBackend
from elastic.memory.pages.mapped_storage import MappedStorage
from elastic.memory.pages.page_pool import PagePool
from elastic.memory.pages.virtual_range import VirtualRange
from support.vllm_engine.rank import layer_outermost

PAGE = 4096
SLOTS = 12


def in_the_system(address: int, nbytes: int) -> int:
    """Mappings that Linux has there."""
    with open("/proc/self/maps") as file:
        ends = [[int(end, 16) for end in line.split()[0].split("-")] for line in file]
    return sum(start < address + nbytes and stop > address for start, stop in ends)


def words(backend: MemfdBackend, address: int, page: int = 0) -> torch.Tensor:
    return MappedStorage(address + page * PAGE, PAGE, backend.device, lambda: None).tensor(torch.int64)


def stretches(shown: list[int | None]) -> int:
    """Of consecutive pages, and of nothing."""
    follows = [a is b if a is None or b is None else b == a + 1 for a, b in itertools.pairwise(shown)]
    return 1 + follows.count(False)


@given(st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(1, SLOTS), st.booleans()), max_size=25), st.booleans())
@settings(deadline=None)
def test_stretches_are_counted_as_the_system_makes_them(steps: list[tuple[int, int, bool]], parked: bool) -> None:
    quota = MappingQuota(10**6, 0)
    backend = MemfdBackend(PAGE, quota=quota)
    if not parked:
        backend._page_tables.close()
    address = backend.reserve(SLOTS * PAGE)
    backend.create(range(SLOTS))
    for page in range(SLOTS):
        backend.map(address, [page])
        words(backend, address)[0] = page
        backend.unmap(address, 1)
    shown: list[int | None] = [None] * SLOTS
    order = random.Random(len(steps)).sample(range(SLOTS), SLOTS)
    for slot, count, scattered in steps:
        part = shown[slot : slot + count]
        free = [page for page in (order if scattered else range(SLOTS)) if page not in shown]
        if all(page is None for page in part) and len(free) >= len(part):
            backend.map(address + slot * PAGE, free[: len(part)])
            shown[slot : slot + count] = free[: len(part)]
        elif None not in part:
            backend.unmap(address + slot * PAGE, len(part))
            shown[slot : slot + count] = [None] * len(part)
        assert quota.used == stretches(shown)
        assert [None if page is None else int(words(backend, address, i)[0]) for i, page in enumerate(shown)] == shown
    assert quota.used >= in_the_system(address, SLOTS * PAGE)
    mapped = [i for i, page in enumerate(shown) if page is not None]
    for slot in mapped:
        backend.unmap(address + slot * PAGE, 1)
    backend.unreserve(address, SLOTS * PAGE)
    assert (quota.used, backend.mappings) == (0, 0)
    backend.close()


def test_holes_are_counted_too_and_memory_can_be_given_back_when_no_more_can_be_mapped() -> None:
    quota = MappingQuota(9, 8)
    pool = PagePool("cpu#test", MemfdBackend(PAGE, quota=quota), 64 * PAGE, ready_pages=0)
    full, other = VirtualRange(pool, 16), VirtualRange(pool, 16)
    full.map(0, pool.allocate("kv", 16))
    assert quota.used == 2  # one without gaps, one without pages
    for slot in (2, 5, 8):
        pool.free(full.unmap(slot, 1))
    assert quota.used == 8
    pages = pool.allocate("kv", 1)
    with pytest.raises(CapacityError, match="larger page_bytes"):
        other.map(3, pages)  # with a gap at each side
    other.map(0, pages)
    for slot in (11, 13):  # above what may be mapped: in the spare ones
        pool.free(full.unmap(slot, 1))
    assert quota.used == 13
    pool.check()
    for made in (full, other):
        made.close()
    assert quota.used == 0
    pool.close()


def test_places_of_a_process_share_its_mappings() -> None:
    quota = MappingQuota(3, 0)
    first, second = (MemfdBackend(PAGE, quota=quota) for _ in range(2))
    address = first.reserve(4 * PAGE)
    first.create([0])
    first.map(address, [0])
    other = second.reserve(PAGE)
    with pytest.raises(CapacityError, match="max_map_count"):
        second.reserve(PAGE)
    second.unreserve(other, PAGE)
    first.unmap(address, 1)
    assert quota.used == 1
    first.close()
    second.close()


def test_a_cache_of_many_rows_runs_out_of_mappings_in_words_and_goes_on() -> None:
    quota = MappingQuota(300, 50)
    pool = PagePool("cpu#test", MemfdBackend(PAGE, quota=quota), 1024 * PAGE, ready_pages=0)
    kv = KVPool(pool, 1024 * PAGE, idle_share=0.0, ready_share=0)
    memory = KVMemory([(kv, HEAD_MAJOR)], 1 << 12)
    layers = [ElasticLayer(memory) for _ in range(3)]
    token = torch.ones(8, 4, PAGE // 64, 16)  # each of its 32 rows has a page for keys, and one for values
    layers[0].update(token, token)
    layers[1].update(token, token)
    with pytest.raises(CapacityError, match="use a larger page_bytes or fewer rows"):
        layers[2].update(token, token)
    kv.check()
    assert quota.used <= quota.most
    layers[0].crop(-1)
    layers[0].update(token[:, :, :1], token[:, :, :1])
    del layers
    kv.retire_ended()
    kv.trim()
    kv.check()
    assert (kv.status().used_bytes, pool.backend.mappings) == (0, 0)
    kv.close()


def test_what_lacks_mappings_half_way_leaves_none_behind() -> None:
    quota = MappingQuota(1, 0)
    pool = PagePool("cpu#test", MemfdBackend(PAGE, quota=quota), 64 * PAGE, ready_pages=0)
    kv = KVPool(pool, 64 * PAGE)
    token = torch.ones(1, 1, 1, 16)
    with pytest.raises(CapacityError, match="max_map_count"):  # for the values of a cache
        ElasticLayer(KVMemory([(kv, HEAD_MAJOR)], 64)).update(token, token)
    assert quota.used == 0
    with pytest.raises(CapacityError, match="max_map_count"):  # for the second layer of an engine
        BlockMemory(kv, (BlockGroup((0, 1), PAGE),))
    assert quota.used == 0
    kv.close()
    pool.close()


@pytest.mark.parametrize(
    "engine_memory",
    [
        lambda kv: BlockMemory(kv, (BlockGroup((0, 1), PAGE),)),
        lambda kv: KVSectors(kv, layer_outermost("ab", 8, PAGE), 8),
    ],
)
def test_an_engine_of_a_model_that_was_unwrapped_leaves_no_mapping_behind(
    engine_memory: Callable[[KVPool], object],
) -> None:
    quota = MappingQuota(100, 0)
    pool = PagePool("cpu#test", MemfdBackend(PAGE, quota=quota), 64 * PAGE, ready_pages=0)
    kv = KVPool(pool, 64 * PAGE)
    kv.close()
    used = quota.used
    with pytest.raises(StateError, match="unwrapped"):
        engine_memory(kv)
    assert quota.used == used
    pool.close()
