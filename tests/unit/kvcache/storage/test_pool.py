"""The limit of the KV cache: applied, deferred, stale; what binds whom (docs/design.md)."""

from __future__ import annotations

import copy
import gc
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from elastic import CapacityError
from elastic.actions.resize_kv import ResizeHandler
from elastic.kvcache.layers.elastic_layer import ElasticLayer
from elastic.kvcache.manager import KVMemory
from elastic.kvcache.storage.budget import WeightsShare
from elastic.kvcache.storage.layout import HEAD_MAJOR
from elastic.kvcache.storage.pool import KVPool
from elastic.memory.backends.memfd import MemfdBackend
from elastic.memory.pages import finalizers
from elastic.memory.pages.page_pool import PagePool
from elastic.types import ResizeKV
from support.faulty_backend import FaultyBackend

PAGE = 4096


def new_memory(pages: int = 64) -> tuple[KVMemory, KVPool]:
    pool = PagePool("cpu#test", MemfdBackend(PAGE), pages * PAGE, ready_pages=0)
    kv = KVPool(pool, pages * PAGE, idle_share=1.0, ready_share=0)
    return KVMemory([(kv, HEAD_MAJOR)], 1 << 16), kv


def layer_of(memory: KVMemory, pages: int) -> ElasticLayer:
    """A layer that holds as many pages for keys as for values."""
    layer = ElasticLayer(memory)
    grow(layer, pages)
    return layer


def grow(layer: ElasticLayer, pages: int) -> torch.Tensor:
    state = torch.ones(1, 1, pages * PAGE // 64, 16)
    return layer.update(state, state)[0]


def test_leases_that_ended_leave_nothing_for_the_end_of_their_layer() -> None:
    memory, kv = new_memory()
    layer, state = ElasticLayer(memory), torch.ones(1, 1, 4, 16)
    layer.lazy_initialization(state, state)
    memory.lease(state, state, 4, layer).end()
    calls = len(finalizers._calls)
    for _ in range(5):
        memory.lease(state, state, 4, layer).end()
    assert len(finalizers._calls) == calls
    memory.lease(state, state, 4, layer).hold(0, 4)
    assert kv.usage.used == 2
    del layer
    kv.retire_ended()
    assert kv.usage.used == 0


def test_a_pool_that_a_driver_keeps_from_closing_is_asked_for_nothing_more() -> None:
    memory, kv = new_memory()
    kv.pool.backend = backend = FaultyBackend(kv.pool.backend)
    layer_of(memory, 1)
    kv.retire_ended()
    backend.fail("unmap")
    with suppress(CapacityError):
        kv.close()
    assert backend.failures == 1
    assert (kv.pool.reclaimers, kv.pool.claims) == ([], {})


def test_what_a_cache_grows_by_is_not_taken_from_itself() -> None:
    """Its keys have a page more after an extension that failed half way; it needs that one too."""
    memory, kv = new_memory(8)
    kv.pool.backend = backend = FaultyBackend(kv.pool.backend)
    layer = layer_of(memory, 1)
    backend.fail("map", 2)
    with pytest.raises(CapacityError, match="injected"):
        grow(layer, 1)
    kv.pool.charge("others", 5 * PAGE)
    with pytest.raises(CapacityError, match="too few free pages for kv"):
        grow(layer, 1)
    kv.check()
    kv.pool.discharge("others", 5 * PAGE)
    assert torch.equal(grow(layer, 1), torch.ones(1, 1, 2 * PAGE // 64, 16))


def test_a_shrink_gives_back_what_idle_caches_hold() -> None:
    memory, kv = new_memory()
    del_me = layer_of(memory, 8)
    keep = layer_of(memory, 4)
    del del_me
    assert kv.status().idle_bytes == 16 * PAGE
    result = kv.resize(10 * PAGE)
    assert (result.status, result.overage_bytes, result.released_bytes) == ("applied", 0, 16 * PAGE)
    assert kv.pool.backend.created == 8
    assert keep.get_seq_length() == 4 * PAGE // 64


def test_resident_memory_falls_by_what_a_shrink_says() -> None:
    memory, kv = new_memory()
    layers = [layer_of(memory, 4) for _ in range(6)]
    backend = kv.pool.backend
    assert isinstance(backend, MemfdBackend)
    before = os.fstat(backend._file).st_blocks * 512
    del layers[2:]
    result = kv.resize(20 * PAGE)
    assert result.released_bytes == 32 * PAGE
    assert before - os.fstat(backend._file).st_blocks * 512 == result.released_bytes


def test_a_shrink_below_what_lives_is_deferred_and_completes_as_caches_end() -> None:
    memory, kv = new_memory()
    settled = []
    kv.on_settled = settled.append
    first, second = layer_of(memory, 8), layer_of(memory, 8)
    result = kv.resize(20 * PAGE)
    assert (result.status, result.overage_bytes) == ("deferred", 12 * PAGE)
    grow(first, 2)  # it lived before the shrink: it may grow past the limit
    assert kv.status().used_bytes == 36 * PAGE
    with pytest.raises(CapacityError, match="limit"):
        layer_of(memory, 1)  # a new one may not
    del second
    assert kv.status().used_bytes == 20 * PAGE
    assert kv.status().idle_bytes == 0
    assert [r.status for r in settled] == ["applied"]
    assert kv.pool.backend.created == 20


def test_growing_back_to_the_first_maximum_always_works() -> None:
    memory, kv = new_memory()
    layer = layer_of(memory, 8)
    assert kv.resize(0).status == "deferred"
    assert kv.resize(64 * PAGE).status == "applied"
    grow(layer, 24)
    assert kv.status().used_bytes == 64 * PAGE
    with pytest.raises(CapacityError) as error:
        grow(layer, 1)
    assert (error.value.requested_bytes, error.value.free_bytes) == (2 * PAGE, 0)
    with pytest.raises(CapacityError, match="above the maximum"):
        kv.resize(65 * PAGE)
    assert kv.status().limit_bytes == 64 * PAGE


def test_a_stale_limit_is_refused() -> None:
    _, kv = new_memory()
    assert kv.resize(32 * PAGE, revision=5).status == "applied"
    for revision in (5, 4, 0):
        result = kv.resize(8 * PAGE, revision=revision)
        assert (result.status, result.limit_bytes, result.revision) == ("stale", 32 * PAGE, 5)
    assert kv.resize(8 * PAGE).revision == 6
    assert kv.resize(9 * PAGE, revision=7).status == "applied"


def test_an_idle_store_is_adopted_by_the_next_cache_of_its_shape() -> None:
    memory, kv = new_memory()
    layer = layer_of(memory, 8)
    address = layer.keys.data_ptr()  # type: ignore[union-attr]
    mappings = kv.pool.backend.mappings
    del layer
    again = layer_of(memory, 3)
    assert again.keys.data_ptr() == address  # type: ignore[union-attr]
    assert kv.pool.backend.mappings == mappings
    assert len(kv.usage.stores) == 1


def test_spare_pages_of_a_cropped_cache_serve_others() -> None:
    memory, kv = new_memory(32)
    layer = layer_of(memory, 16)
    layer.crop(-12 * PAGE // 64)
    assert kv.status().used_bytes == 32 * PAGE
    other = layer_of(memory, 12)
    assert kv.status().used_bytes == 32 * PAGE
    assert other.get_seq_length() == 12 * PAGE // 64
    kv.check()


def test_a_view_held_outside_keeps_its_pages_and_is_counted() -> None:
    memory, kv = new_memory()
    layer = layer_of(memory, 8)
    view = layer.keys[:, :, 5:7]  # type: ignore[index]
    del layer
    gc.collect()
    status = kv.status()
    assert (status.used_bytes, status.retained_bytes) == (0, 16 * PAGE)
    assert kv.pool.status().owners["retained"] == 16 * PAGE
    result = kv.resize(0)
    assert (result.status, result.released_bytes) == ("applied", 0)
    assert view.eq(1).all()
    del view
    assert kv.status().retained_bytes == 0
    assert kv.pool.backend.created == 0
    kv.check()


def test_a_view_held_outside_survives_cropping_and_shrinking() -> None:
    memory, kv = new_memory()
    layer = layer_of(memory, 8)
    view = layer.keys
    layer.crop(-7 * PAGE // 64)
    result = kv.resize(4 * PAGE)
    # The keys' pages cannot go while the view shows them, those of the values can.
    assert (result.status, result.used_bytes) == ("deferred", 9 * PAGE)
    assert view.eq(1).all()  # type: ignore[union-attr]
    del view
    assert kv.resize(4 * PAGE).status == "applied"


def test_the_watermark_bounds_what_idle_caches_keep() -> None:
    memory, kv = new_memory()
    kv.reclaimer.idle_share = 0.25
    layers = [layer_of(memory, 4) for _ in range(4)]
    layers.clear()
    assert kv.status().idle_bytes == 16 * PAGE
    assert kv.trim() == 16 * PAGE
    assert kv.pool.backend.created == 0


def test_two_instances_share_a_place() -> None:
    memory, kv = new_memory(32)
    other = KVPool(kv.pool, 32 * PAGE, idle_share=1.0, ready_share=0)
    other_memory = KVMemory([(other, HEAD_MAJOR)], 1 << 16)
    layer = layer_of(memory, 12)
    assert other.status().capacity_bytes == 8 * PAGE
    with pytest.raises(CapacityError):
        layer_of(other_memory, 8)
    del layer  # its pages stay mapped, idle, until the neighbour needs them
    assert kv.status().idle_bytes == 24 * PAGE
    neighbour = layer_of(other_memory, 14)
    assert kv.status().idle_bytes == 0
    assert neighbour.get_seq_length()
    kv.check()
    other.check()


def offloading() -> tuple[KVMemory, KVPool, ResizeHandler]:
    memory, kv = new_memory()
    kv.host_offload = True
    return memory, kv, ResizeHandler(memory)


def resize(mechanism: ResizeHandler, pages: int) -> Any:
    action = ResizeKV("cpu#test", pages * PAGE)
    foreseen = mechanism.dry_run(action)
    prepared = mechanism.prepare(action)
    mechanism.commit(prepared)
    result = mechanism.finish(prepared)
    assert foreseen.status == result.status
    return result, prepared


def test_a_resize_that_is_rolled_back_follows_the_maximum_again() -> None:
    _, kv, mechanism = offloading()
    _, prepared = resize(mechanism, 4)
    WeightsShare(kv).give_to_cache(3)  # weights went meanwhile
    mechanism.rollback(prepared)
    assert kv.limits.limit == kv.limits.maximum


class Cache:
    def __init__(self, layer: ElasticLayer | None) -> None:
        self.layers = [layer] if layer is not None else []


def used(memory: KVMemory, *layers: ElasticLayer | None) -> list[Cache]:
    """A cache for each layer, used by this thread in turn: all but the last are at rest."""
    caches = [Cache(layer) for layer in layers]
    for cache in caches:
        memory.begin_forward(cache)
    return caches


def test_a_cache_at_rest_waits_in_host_memory_when_a_shrink_needs_its_pages() -> None:
    memory, kv, mechanism = offloading()
    resting, older, running = layer_of(memory, 4), layer_of(memory, 6), layer_of(memory, 8)
    resting.update(torch.full((1, 1, 1, 16), 5.0), torch.full((1, 1, 1, 16), 6.0))  # now `older` is the oldest
    before = [t.clone() for t in (*(older.views()), *(resting.views()))]
    caches = used(memory, resting, older, running)
    result, _ = resize(mechanism, 28)
    assert (result.status, result.moved_bytes) == ("applied", 12 * PAGE)
    assert (older.pages, resting.pages, running.pages) == (0, 10, 16)
    result, _ = resize(mechanism, 12)  # the running cache is over the limit by itself
    assert (result.status, result.overage_bytes) == ("deferred", 4 * PAGE)
    assert kv.status().used_bytes == 16 * PAGE
    assert len(caches) == 3
    # They come back when they are used, though new caches are refused: they lived before the limit fell.
    with pytest.raises(CapacityError):
        layer_of(memory, 1)
    assert all(torch.equal(a, b) for a, b in zip((*older.views(), *resting.views()), before, strict=True))
    assert kv.status().used_bytes == 38 * PAGE
    kv.check()


def test_a_cache_that_was_used_since_it_was_copied_stays() -> None:
    memory, kv, mechanism = offloading()
    layer = layer_of(memory, 4)
    caches = used(memory, layer, None)
    prepared = mechanism.prepare(ResizeKV("cpu#test", 0))
    assert len(prepared.copies) == 1
    grow(layer, 1)
    mechanism.commit(prepared)
    assert mechanism.finish(prepared).status == "deferred"
    assert mechanism.finish(prepared).moved_bytes == 0
    assert layer.pages == 10
    assert memory.resting(kv) == caches[0].layers


def test_a_cache_begins_in_another_thread_while_those_that_rest_are_looked_for() -> None:
    memory, kv = new_memory()
    caches = [DynamicCache() for _ in range(3)]
    begins = threading.Thread(target=memory.begin_forward, args=(caches[-1],))

    class Watched(weakref.WeakSet[object]):
        def __iter__(self) -> Iterator[object]:
            for cache in super().__iter__():
                if begins.ident is None:
                    begins.start()
                    begins.join(0.2)  # it waits for its turn, or has begun
                yield cache

    memory._caches = Watched()
    for cache in caches[:2]:
        memory.begin_forward(cache)
    assert memory.resting(kv) == []
    begins.join()
    assert set(memory._caches) == set(caches)


def test_what_waits_on_the_host_can_be_cropped_copied_reset_and_dropped() -> None:
    memory, kv, mechanism = offloading()
    layers = [layer_of(memory, 2) for _ in range(5)]
    caches = used(memory, *layers, None)
    assert resize(mechanism, 0)[0].status == "applied"
    assert kv.pool.backend.created == 0
    layers[0].crop(-3)
    assert layers[0].get_seq_length() == 2 * PAGE // 64 - 3
    assert copy.deepcopy(layers[1]).keys.eq(1).all()  # type: ignore[union-attr]
    layers[2].reset()
    grow_refused = layers[2]
    kv.resize(kv.limits.maximum * PAGE)
    grow(grow_refused, 1)
    assert layers[3].to_stock().keys.shape == (1, 1, 2 * PAGE // 64, 16)  # type: ignore[union-attr]
    layers[4].become_stock()
    assert layers[4].values.eq(1).all()  # type: ignore[union-attr]
    layers.clear()
    caches.clear()
    del grow_refused
    assert kv.status().used_bytes == 0


def test_a_failure_to_come_back_keeps_the_host_copy() -> None:
    memory, kv, mechanism = offloading()
    layer = layer_of(memory, 4)
    caches = used(memory, layer, None)
    resize(mechanism, 0)
    assert layer.pages == 0
    pages = kv.pool.allocate("layer:0", kv.pool.free_pages - 3)
    with pytest.raises(CapacityError):
        grow(layer, 1)
    kv.pool.free(pages)
    assert grow(layer, 1).eq(1).all()
    assert caches[0].layers[0].get_seq_length() == 5 * PAGE // 64


def test_who_waits_for_room_is_told_when_less_is_held_back() -> None:
    pool = PagePool("cpu", MemfdBackend(4096), 64 * 4096, ready_pages=0)
    kv, told = KVPool(pool, 32 * 4096), []
    pool.listeners.append(lambda: told.append(kv.limits.open))
    share = WeightsShare(kv)
    for pages in (8, 12, 12, 5, 0):
        share.hold_back(pages)
    assert told == [27, 32]
    pool.close()
