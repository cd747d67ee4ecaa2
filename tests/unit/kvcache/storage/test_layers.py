"""Layers whose KV comes and goes under sectors that stay, and the sectors of another instance beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic import CapacityError
from elastic.errors import ConfigError, IntegrityError, Overloaded, StateError
from elastic.kvcache.storage.budget import WeightsShare
from elastic.kvcache.storage.guest import GuestMemory
from elastic.kvcache.storage.paged import BlockMemory
from elastic.kvcache.storage.pool import KVPool
from elastic.kvcache.storage.sector_space import BlockGroup
from elastic.memory.backends.memfd import MemfdBackend
from elastic.memory.pages.page_pool import PagePool
from support.faulty_backend import FaultyBackend

PAGE = 4096
FOUR = (BlockGroup((0, 1, 2, 3), PAGE // 2),)  # a sector is a page in each layer
TWO_KINDS = (BlockGroup((0, 2, 3), PAGE), BlockGroup((1,), PAGE))  # a page in each of three layers, three in the other


def pool_of(pages: int) -> tuple[KVPool, FaultyBackend]:
    backend: Any = FaultyBackend(MemfdBackend(PAGE))
    pool = PagePool("cpu#test", backend, pages * PAGE, ready_pages=0)
    return KVPool(pool, pages * PAGE, idle_share=1.0, ready_share=0), backend


def check(kv: KVPool) -> None:
    kv.check()
    assert kv.usage.used + kv.usage.idle == kv.pool.pages_of("kv") - kv.reserved


def shown(memory: BlockMemory | GuestMemory, layer: int, sector: int) -> torch.Tensor:
    ranges = memory.groups[memory.group_of(layer)]
    nbytes = ranges.layer_pages * PAGE
    return ranges.view(layer, torch.uint8)[sector * nbytes : (sector + 1) * nbytes]


def test_parts_of_a_decoder_layer_lie_one_behind_another_and_leave_each_by_itself() -> None:
    kv, _ = pool_of(16)
    memory = BlockMemory(kv, (BlockGroup((0, 1, 2, 3), PAGE // 2, kv_shards=2),))
    sectors = [memory.allocate(0) for _ in range(3)]
    for part in range(4):
        for sector in sectors:
            shown(memory, part, sector)[:] = 10 * part + sector + 1
    both = memory.groups[0].view_parts(1, torch.uint8).view(2, memory.sectors, PAGE)
    assert [[int(both[part, sector, -1]) for sector in sectors] for part in range(2)] == [[21, 22, 23], [31, 32, 33]]
    before = {part: memory.groups[0].layer_pages_of(part, sectors[1]) for part in range(4)}
    assert memory.remove_layers((2,)) == 3
    assert (memory.layers, memory.sector_pages) == ((0, 1, 3), 3)
    check(kv)
    for part in memory.layers:
        assert memory.groups[0].layer_pages_of(part, sectors[1]) == before[part]
        assert all(bool((shown(memory, part, sector) == 10 * part + sector + 1).all()) for sector in sectors)
    memory.add_layers((2,))
    assert bool((both[1, :3] == torch.tensor([[31], [32], [33]])).all())
    check(kv)
    memory.close()


def test_a_layer_that_leaves_frees_its_pages_and_what_is_in_the_others_stays() -> None:
    kv, _ = pool_of(16)
    memory = BlockMemory(kv, FOUR)
    sectors = [memory.allocate(0) for _ in range(3)]
    for layer in range(4):
        for sector in sectors:
            shown(memory, layer, sector)[:] = 10 * layer + sector + 1
    assert memory.remove_layers((1, 3)) == 6
    assert (memory.layers, memory.sector_pages, memory.used_pages, memory.used_sectors) == ((0, 2), 2, 6, 3)
    assert memory.room(growing=False) == 5
    check(kv)
    new = memory.allocate(0)
    memory.add_layers((3,))
    assert (memory.layers, memory.used_pages) == ((0, 2, 3), 12)
    shown(memory, 3, new)[:] = 77
    for layer in (0, 2):
        for sector in sectors:
            assert bool((shown(memory, layer, sector) == 10 * layer + sector + 1).all())
    check(kv)
    memory.close()
    assert kv.pool.free_pages == 16


@pytest.mark.parametrize(("layers", "pages", "sectors"), [(4, 16, 16), (12, 30, 30), (32, 64, 32), (32, 31, 15)])
def test_a_layer_that_stays_may_have_all_of_the_budget_in_models_that_are_not_deep(
    layers: int, pages: int, sectors: int
) -> None:
    memory = BlockMemory(pool_of(pages)[0], (BlockGroup(tuple(range(layers)), PAGE),))
    memory.remove_layers(range(1, layers))
    assert (memory.sectors, memory.room(growing=True)) == (sectors, sectors)
    for _ in range(sectors):
        memory.allocate(0)
    with pytest.raises(CapacityError):
        memory.allocate(0)
    memory.check()


@pytest.mark.parametrize("call", ["remove_layers", "add_layers"])
def test_layers_come_and_go_once(call: str) -> None:
    memory = BlockMemory(pool_of(16)[0], FOUR)
    memory.remove_layers((1,))
    words = r"layers \[1\] is not here" if call == "remove_layers" else r"layers \[0\] is here already"
    with pytest.raises(StateError, match=words):
        getattr(memory, call)((0, 1))
    assert memory.layers == (0, 2, 3)
    with pytest.raises(StateError, match="there is no layer 9"):
        getattr(memory, call)((9,))
    with pytest.raises(StateError, match="layer 1 is not here"):
        memory.groups[0].view(1, torch.uint8)


def test_a_layer_does_not_come_where_live_requests_and_their_promises_leave_no_room() -> None:
    kv, _ = pool_of(16)
    memory = BlockMemory(kv, FOUR)
    memory.remove_layers((2, 3))
    for _ in range(4):
        memory.allocate(0)
    memory.promised = lambda: 2  # six sectors of three pages are too many
    with pytest.raises(CapacityError, match="no room for layers"):
        memory.add_layers((2,))
    assert (memory.layers, memory.used_pages) == ((0, 1), 8)
    memory.promised = lambda: 1
    memory.add_layers((2,))
    assert memory.used_pages == 12
    check(kv)


def test_idle_sectors_make_room_for_a_layer_also_where_no_layer_was_left() -> None:
    kv, _ = pool_of(8)
    memory = BlockMemory(kv, FOUR)
    memory.remove_layers(range(4))
    assert (memory.sector_pages, memory.used_sectors, memory.room(growing=True)) == (0, 0, 8)
    sectors = [memory.allocate(0) for _ in range(4)]
    assert (memory.used_sectors, memory.used_pages, kv.pool.free_pages) == (4, 0, 8)
    memory.changes()
    for sector in sectors[:2]:
        memory.free(0, sector)
    memory.add_layers(range(4))
    assert (memory.mapped_sectors, memory.used_pages) == (((0, 2), (0, 3)), 8)
    assert memory.changes() == ((), ((0, 0), (0, 1)))
    check(kv)


@pytest.mark.parametrize(("call", "nth"), [("create", 1), ("map", 1), ("map", 2)])
def test_a_fault_of_the_driver_leaves_layers_as_they_were(call: str, nth: int) -> None:
    kv, backend = pool_of(16)
    memory = BlockMemory(kv, FOUR)
    memory.remove_layers((2, 3))
    sectors = [memory.allocate(0) for _ in range(3)]
    shown(memory, 1, sectors[2])[:] = 5
    kv.pool.trim()
    backend.fail(call, nth)
    with pytest.raises(CapacityError, match="injected"):
        memory.add_layers((2, 3))
    assert (memory.layers, memory.used_pages) == ((0, 1), 6)
    check(kv)
    memory.add_layers((2, 3))
    backend.fail("unmap", 1)
    with pytest.raises(CapacityError, match="injected"):
        memory.remove_layers((2, 3))
    assert memory.layers == (0, 1, 2, 3)
    assert bool((shown(memory, 1, sectors[2]) == 5).all())
    check(kv)


def test_where_groups_have_sectors_of_several_sizes_the_largest_counts() -> None:
    kv, _ = pool_of(24)
    memory = BlockMemory(kv, TWO_KINDS)
    assert [group.sector_pages for group in memory.groups] == [3, 3]
    memory.remove_layers((2, 3))
    assert [group.sector_pages for group in memory.groups] == [1, 3]
    memory.allocate(0)
    memory.allocate(1)
    assert (memory.used_pages, memory.sector_pages, memory.used_sectors, memory.sectors_in_use) == (4, 3, 1, 2)
    assert memory.room(growing=True) == 6
    memory.promised = lambda: 6
    assert WeightsShare(kv).shortfall(3) == 1
    check(kv)


def test_a_lower_cap_is_for_new_requests_until_those_that_live_can_end_under_it() -> None:
    kv, _ = pool_of(64)
    memory = BlockMemory(kv, FOUR)
    held = [memory.allocate(0) for _ in range(3)]
    memory.promised = lambda: 3
    memory.set_cap(4)
    assert not memory.reached_cap()
    assert (memory.room(growing=False), memory.room(growing=True)) == (1, 13)
    held += [memory.allocate(0) for _ in range(3)]
    memory.promised = lambda: 0
    memory.set_cap(5)
    assert not memory.reached_cap()
    for _ in range(2):
        memory.free(0, held.pop())
    assert memory.mapped_count == 5, "what comes to be idle above the cap is given back"
    assert memory.reached_cap()
    assert (memory.room(growing=False), memory.room(growing=True)) == (1, 1)
    memory.set_cap(7)
    assert memory.reached_cap()
    assert memory.room(growing=True) == 3
    memory.set_cap(None)
    assert memory.room(growing=True) == 12
    assert memory.reached_cap()


def test_the_cap_counts_all_sectors_that_are_mapped() -> None:
    kv, _ = pool_of(64)
    memory = BlockMemory(kv, FOUR)
    memory.set_cap(3)
    assert (memory.room(growing=True), memory.capacity) == (3, 3)
    held = [memory.allocate(0) for _ in range(3)]
    with pytest.raises(CapacityError, match="all 3 sectors"):
        memory.allocate(0)
    with pytest.raises(Overloaded, match="room for 3"):
        memory.require_possible(4, "a request")
    memory.require_possible(3, "a request")
    memory.set_cap(None)
    held += [memory.allocate(0) for _ in range(2)]
    memory.promised = lambda: 1
    memory.free(0, held.pop())
    memory.set_cap(4)
    assert (memory.reached_cap(), memory.mapped_count, memory.room(growing=True)) == (False, 4, 12)
    memory.free(0, held.pop())
    assert (memory.reached_cap(), memory.mapped_count, memory.room(growing=True)) == (True, 4, 1)
    memory.set_cap(3)
    memory.promised = lambda: 0
    assert (memory.mapped_count, memory.reached_cap()) == (3, True)
    with pytest.raises(ConfigError, match="sectors=-1"):
        memory.set_cap(-1)


def test_at_the_cap_a_group_gets_the_idle_sector_of_another() -> None:
    kv, _ = pool_of(64)
    memory = BlockMemory(kv, TWO_KINDS)
    memory.set_cap(2)
    first = memory.allocate(0)
    memory.allocate(1)
    memory.changes()
    memory.free(0, first)
    assert memory.mapped_count == 2
    memory.allocate(1)
    assert memory.mapped_count == 2
    assert [len(group.mapped) for group in memory.groups] == [0, 2]
    mapped, unmapped = memory.changes()
    assert (unmapped, len(mapped)) == (((0, first),), 1)
    check(kv)


def test_changes_are_what_remains_of_them() -> None:
    kv, _ = pool_of(64)
    memory = BlockMemory(kv, FOUR)
    first, second = memory.allocate(0), memory.allocate(0)
    assert memory.changes() == (((0, first), (0, second)), ())
    assert memory.changes() == ((), ())
    memory.free(0, first)
    memory.trim(4)
    assert memory.allocate(0) == first, "unmapped and mapped again"
    third = memory.allocate(0)
    memory.free(0, third)
    memory.trim(4)
    assert memory.changes() == (((0, first),), ((0, first), (0, third))), "who copied ahead has mapped the third"
    memory.free(0, second)
    memory.keep_sectors = True
    assert memory.trim(4) == 0
    memory.keep_sectors = False
    memory.trim(4)
    assert memory.changes() == ((), ((0, second),))


def test_sectors_that_are_given_back_while_a_layer_comes_are_not_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kv, _ = pool_of(16)
    memory = BlockMemory(kv, FOUR)
    memory.remove_layers((3,))
    kept = memory.allocate(0)
    memory.free(0, memory.allocate(0))
    allocate = kv.pool.allocate

    def trim_before(owner: str, count: int) -> list[int]:
        memory.trim(3)
        return allocate(owner, count)

    monkeypatch.setattr(kv.pool, "allocate", trim_before)
    memory.add_layers((3,))
    assert (memory.mapped_sectors, memory.used_pages) == (((0, kept),), 4)
    check(kv)


def test_no_sector_is_given_back_while_they_are_to_be_kept() -> None:
    kv, _ = pool_of(16)
    memory = BlockMemory(kv, FOUR)
    memory.free(0, memory.allocate(0))
    memory.keep_sectors = True
    memory.set_cap(0)
    assert (memory.reached_cap(), memory.trim(4), memory.mapped_count) == (False, 0, 1)
    memory.keep_sectors = False
    assert (memory.reached_cap(), memory.mapped_count) == (True, 0)


def test_weights_get_the_pages_of_idle_sectors_and_not_those_of_a_guest() -> None:
    kv, _ = pool_of(16)
    memory, guest = BlockMemory(kv, FOUR), GuestMemory(kv, FOUR, 8)
    guest.allot(4)
    guest.add_layers((0,))
    for sector in [memory.allocate(0), memory.allocate(0)]:
        memory.free(0, sector)
    assert WeightsShare(kv).take_from_cache(6)
    kv.pool.reserve("layer:0", 6)
    assert not WeightsShare(kv).take_from_cache(7)
    assert WeightsShare(kv).take_from_cache(6)
    kv.pool.reserve("layer:1", 6)
    guest.map((0, sector) for sector in range(4))
    check(kv)


def test_what_a_guest_was_allotted_nobody_else_gets() -> None:
    kv, _ = pool_of(20)
    memory, guest = BlockMemory(kv, FOUR), GuestMemory(kv, FOUR, 16)
    memory.remove_layers((2, 3))
    memory.allocate(0)
    memory.promised = lambda: 1
    guest.allot(4)
    assert guest.usage.promised() == 0, "of layers that are not here nothing is kept"
    guest.map([(0, 5)])
    guest.add_layers((2, 3))
    assert (guest.mapped_pages, guest.usage.promised(), kv.pool.free_pages) == (2, 6, 10)
    assert (memory.room(growing=False), memory.capacity) == (5, 6)
    with pytest.raises(CapacityError, match="no room to promise"):
        guest.allot(9)
    guest.allot(8)
    memory.promised = lambda: 0
    assert memory.room(growing=True) == 1
    memory.allocate(0)
    with pytest.raises(CapacityError):
        memory.allocate(0)
    guest.map((0, sector) for sector in range(6, 12))
    guest.map([(0, 1), (0, 5)])
    assert (guest.mapped_pages, guest.usage.promised(), guest.mapped_count) == (16, 0, 8)
    check(kv)


def test_a_guest_gets_no_more_than_it_was_allotted_nor_keeps_less_than_it_has() -> None:
    kv, _ = pool_of(20)
    guest = GuestMemory(kv, FOUR, 8)
    guest.allot(2)
    guest.add_layers((0,))
    guest.map([(0, 3), (0, 4)])
    for refs, words in (([(0, 0)], "2 were allotted"), ([(0, 8)], "addresses for 8")):
        with pytest.raises(StateError, match=words):
            guest.map(refs)
    with pytest.raises(StateError, match="2 sectors are mapped"):
        guest.allot(1)
    with pytest.raises(ConfigError, match="8 at the most"):
        guest.allot(9)
    guest.unmap([(0, 3), (0, 7), (0, 3)])
    assert (guest.mapped_pages, guest.usage.promised()) == (1, 1)
    guest.allot(1)
    assert (guest.mapped_pages, guest.usage.promised()) == (1, 0)
    check(kv)
    guest.close()
    guest.close()
    assert kv.pool.free_pages == 20
    with pytest.raises(StateError, match="closed"):
        guest.allot(1)


def test_layers_of_a_guest_come_whole_or_not_at_all() -> None:
    kv, backend = pool_of(8)
    guest = GuestMemory(kv, FOUR, 8)
    guest.allot(3)
    guest.map([(0, 0), (0, 6)])
    guest.add_layers((1, 2))
    shown(guest, 2, 6)[:] = 9
    with pytest.raises(CapacityError, match="no room to promise"):
        guest.add_layers((0,))
    guest.allot(2)
    for call, nth in (("create", 1), ("map", 1), ("map", 2)):
        kv.pool.trim()
        backend.fail(call, nth)
        with pytest.raises(CapacityError, match="injected"):
            guest.add_layers((0,))
        assert (guest.layers, guest.mapped_pages, guest.usage.promised()) == ((1, 2), 4, 0)
        check(kv)
    guest.add_layers((0,))
    assert guest.mapped_pages == 6
    assert guest.remove_layers((1, 0)) == 4
    assert (guest.layers, kv.pool.free_pages) == ((2,), 6)
    assert bool((shown(guest, 2, 6) == 9).all())
    check(kv)


def test_a_fault_while_new_sectors_are_mapped_in_several_layers_is_undone() -> None:
    kv, backend = pool_of(16)
    guest = GuestMemory(kv, FOUR, 8)
    guest.allot(4)
    guest.map([(0, 0)])
    guest.add_layers((1, 2))
    backend.fail("map", 2)
    with pytest.raises(CapacityError, match="injected"):
        guest.map([(0, 0), (0, 5)])
    assert (guest.layers, guest.mapped_sectors, guest.usage.promised()) == ((1, 2), ((0, 0),), 6)
    check(kv)


def test_a_lower_limit_waits_for_what_guests_were_allotted() -> None:
    kv, _ = pool_of(16)
    settled: list[Any] = []
    kv.on_settled = settled.append
    guest = GuestMemory(kv, FOUR, 8)
    guest.allot(4)
    guest.add_layers((0, 1))
    assert kv.dry_run_resize(6 * PAGE)[0] == "deferred"
    assert kv.resize(6 * PAGE).status == "deferred"
    guest.map((0, sector) for sector in range(4))
    guest.unmap([(0, 0), (0, 1)])
    assert not settled
    guest.allot(3)
    assert [result.status for result in settled] == ["applied"]
    assert kv.status().capacity_bytes == 6 * PAGE
    check(kv)


def test_a_recount_finds_what_is_wrong() -> None:
    kv, _ = pool_of(16)
    memory, guest = BlockMemory(kv, FOUR), GuestMemory(kv, FOUR, 8)
    guest.allot(2)
    guest.add_layers((0,))
    guest.allotted = 3
    with pytest.raises(IntegrityError, match="are kept for 3 sectors"):
        kv.check()
    guest.allotted = 2
    memory.allocate(0)
    memory.groups[0].layers = (0, 1, 2)
    with pytest.raises(IntegrityError, match="layer 3 shows 1 pages of 0 sectors"):
        memory.check()
