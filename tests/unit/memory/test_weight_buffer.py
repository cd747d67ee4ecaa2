"""Blocks: pages under a layer's parameters, that rest, wake, are taken, and outlive their views."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from elastic.errors import CapacityError, ConfigError
from elastic.memory import weight_buffer
from elastic.memory.backends.memfd import MemfdBackend
from elastic.memory.pages.background import janitor
from elastic.memory.pages.page_pool import PagePool
from elastic.memory.rate_limit import RateLimiter
from elastic.memory.weight_buffer import WeightBuffer
from elastic.memory.weight_layout import ALIGNMENT, LayerLayout, ParameterLayout
from support.child_process import wait_for_the_janitor
from support.faulty_backend import FaultyBackend

PAGE = 4096
LAYOUT = LayerLayout.pack(
    {
        "matrix": ParameterLayout.like(torch.zeros(40, 64)),
        "norm": ParameterLayout.like(torch.zeros(64)),
        "last": ParameterLayout.like(torch.zeros(64, 40).t()),
    }
)


@pytest.fixture(autouse=True)
def janitor_at_work() -> None:
    janitor.start()


def new_pool(pages: int = 32) -> PagePool:
    return PagePool("cpu#test", FaultyBackend(MemfdBackend(PAGE)), pages * PAGE, ready_pages=0)


def filled(pool: PagePool) -> tuple[WeightBuffer, dict[str, torch.Tensor]]:
    block = WeightBuffer(pool, LAYOUT.nbytes)
    block.allocate("layer:0")
    shown = block.show(LAYOUT)
    for value, tensor in enumerate(shown.values()):
        tensor.fill_(value + 1)
    return block, shown


@pytest.mark.parametrize("loose", [0, 3, 11])
def test_blocks_of_the_system_are_shown_where_they_are_one(loose: int) -> None:
    backend = MemfdBackend(PAGE)
    backend.pages_per_huge_page = 4
    pool = PagePool("cpu#test", backend, 40 * PAGE, ready_pages=0)
    kept = pool.allocate("kv", loose)
    block = WeightBuffer(pool, 18 * PAGE)
    for blocks in ((0, 4, 8, 12), (0, 4, 12)):  # what somebody has of a block meanwhile another page replaces
        block.allocate("layer:0")
        pages = block.page_numbers
        assert [list(pages[at : at + 4]) for at in blocks] == [
            list(range(pages[at] // 4 * 4, pages[at] // 4 * 4 + 4)) for at in blocks
        ]
        block.make_reclaimable()
        assert block.reclaim(7) == 7
        kept += pool.allocate("kv", 1)
    pool.free(kept)
    block.close()
    pool.check()
    pool.close()


def test_parameters_lie_side_by_side_each_in_a_storage_of_its_own() -> None:
    pool = new_pool()
    block, shown = filled(pool)
    assert pool.pages_of("layer:0") == len(block.slots) == pool.pages_for(LAYOUT.nbytes)
    starts = [tensor.data_ptr() for tensor in shown.values()]
    assert all((start - starts[0]) % ALIGNMENT == 0 for start in starts)
    for tensor in shown.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert shown["last"].shape == (40, 64)
    assert shown["last"].stride() == (1, 40)
    shown.clear()
    del tensor
    block.close()
    assert pool.backend.created == len(pool.cached)
    pool.check()


def test_a_block_at_rest_is_free_memory_that_wakes_where_it_was() -> None:
    pool = new_pool()
    block, shown = filled(pool)
    address = shown["matrix"].data_ptr()
    shown.clear()
    assert block.hide()
    block.make_reclaimable()
    assert (pool.free_pages, len(pool._reclaimable)) == (32, len(block.slots))
    pool.check()
    block.allocate("layer:0")
    shown = block.show(LAYOUT)
    assert shown["matrix"].data_ptr() == address
    assert bool((shown["matrix"] == 1).all()), "nobody needed the pages, so nothing was even copied"
    shown.clear()
    block.close()


def test_pages_at_rest_go_one_by_one_to_whoever_needs_them() -> None:
    pool = new_pool(24)
    block, shown = filled(pool)
    shown.clear()
    assert block.hide()
    block.make_reclaimable()
    pages = pool.allocate("kv", 24 - len(block.slots) + 3)
    assert len(pool._reclaimable) == len(block.slots) - 3
    with pytest.raises(CapacityError):
        block.allocate("layer:0")
    assert len(pool._reclaimable) == len(block.slots) - 3, "a block that cannot be filled rests"
    pool.free(pages)
    block.allocate("layer:0")
    pool.check()
    block.close()


def test_a_view_keeps_its_pages_and_gives_them_back_when_it_dies() -> None:
    pool = new_pool()
    block, shown = filled(pool)
    view, freed = shown["norm"][:3], []
    pages = len(block.slots)
    shown.clear()
    assert not block.hide()
    assert block.orphan(freed.append) == pages - 1
    assert pool.pages_of("retained") == 1
    assert view.tolist() == [2, 2, 2]
    del view
    wait_for_the_janitor()
    assert freed == [1]
    assert pool.free_pages == 32
    pool.check()


def test_a_closed_block_lives_as_long_as_a_view() -> None:
    pool = new_pool()
    block, shown = filled(pool)
    view = shown["last"]
    shown.clear()
    block.close()
    block.close()
    assert bool((view == 3).all())
    del view
    wait_for_the_janitor()
    assert pool.free_pages == 32


@pytest.mark.parametrize("call", ["create", "map"])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_fill_that_fails_leaves_the_ledger_right(call: str, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic.memory.weight_buffer.PAGES_AT_ONCE", 2)
    pool = new_pool()
    block = WeightBuffer(pool, LAYOUT.nbytes)
    pool.backend.fail(call, nth)  # type: ignore[attr-defined]
    with pytest.raises(CapacityError, match="injected"):
        block.allocate("layer:0")
    pool.check()
    assert pool.free_pages == 32
    block.allocate("layer:0")
    pool.check()
    block.close()


def test_what_the_driver_refuses_to_unmap_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    pool = new_pool()
    block, shown = filled(pool)
    view, freed = shown["norm"], []
    pages = len(block.slots)
    shown.clear()
    assert not block.hide()
    pool.backend.fail("unmap")  # type: ignore[attr-defined]
    now = block.orphan(freed.append)
    wait_for_the_janitor()
    assert now + sum(freed) == pages - 1
    assert "could not be given back yet" in caplog.text
    del view
    wait_for_the_janitor()
    assert now + sum(freed) == pages
    pool.check()


def test_a_transposed_padded_parameter_reads_as_the_checkpoints() -> None:
    checkpoint = torch.arange(6, dtype=torch.float32).view(2, 3)
    layout = ParameterLayout((2, 3), torch.float32, order=(1, 0), padded=(4, 5), cuts=(1,))
    assert layout.strides == (1, 4)
    assert layout.nbytes == 80
    stored = torch.full((20,), -1.0)
    layout.show(stored).copy_(checkpoint)
    assert torch.equal(layout.show(stored), checkpoint)
    assert stored.view(5, 4)[:3, :2].t().tolist() == checkpoint.tolist()
    assert int((stored == -1).sum()) == 14, "padding is not touched"


@pytest.mark.parametrize(
    "change", [{"order": (0, 0)}, {"order": (0,)}, {"padded": (1, 3)}, {"padded": (2,)}, {"cuts": (2,)}]
)
def test_layouts_that_cannot_be(change: dict[str, tuple[int, ...]]) -> None:
    right: dict[str, tuple[int, ...]] = {"order": (0, 1), "padded": (2, 3), "cuts": ()}
    with pytest.raises(ConfigError, match=r"\(2, 3\)"):
        ParameterLayout((2, 3), torch.float32, **{**right, **change})


def test_a_layout_is_that_of_the_tensor() -> None:
    for tensor in (torch.zeros(3, 4), torch.zeros(4, 3).t(), torch.zeros(2, 5, 3).permute(2, 0, 1), torch.zeros(7)):
        layout = ParameterLayout.like(tensor)
        assert layout.strides == tensor.stride()
        assert layout.nbytes == tensor.nbytes


def test_pages_are_made_at_a_pace_while_nobody_is_kept_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = new_pool(200)
    create, kept, free = pool.backend.create, list[int](), list[bool]()

    def try_the_lock() -> None:
        free.append(pool.mapping_lock.acquire(timeout=5))
        pool.mapping_lock.release()

    def watched(pages: Any) -> None:
        other = threading.Thread(target=try_the_lock)
        other.start()
        other.join()
        create(pages)

    class Watch(RateLimiter):
        def acquire(self, nbytes: int) -> None:
            kept.append(nbytes // PAGE)

    monkeypatch.setattr(pool.backend, "create", watched)
    block = WeightBuffer(pool, 150 * PAGE)
    block.allocate("layer:0", Watch())
    assert kept == [64, 64, 22]
    assert free == [True] * 3
    block.make_reclaimable()
    block.allocate("layer:0", Watch())
    assert kept == [64, 64, 22]
    pool.check()
    block.make_reclaimable()
    block.close()


def test_pages_go_and_come_beside_those_that_stay() -> None:
    pool, freed = new_pool(), list[int]()
    block, shown = filled(pool)
    last, slots = shown["last"], range(LAYOUT.page_count(PAGE))
    shown.clear()
    stays = set(slots[2:])
    assert block.shrink(["matrix", "norm"], freed.append, keep=stays) == 2
    assert len(block.page_numbers) == pool.pages_of("layer:0") == len(stays)
    assert bool((last == 3).all())
    pool.check()
    assert block.adopt(slots[:2], "layer:0") == 0
    assert block.unmapped_pages == 2
    block.extend("layer:0")
    assert block.unmapped_pages == 0
    assert bool((last == 3).all())
    rows = block.show_part("matrix[0:16]", 0, 16 * 64 * 4, torch.float32)
    assert rows.shape == (16 * 64,)
    rows.zero_()
    assert "matrix[0:16]" in block.shown
    pool.check()
    del last, rows
    block.close()
    pool.check()


def test_pages_are_counted_once_where_tensors_die_while_work_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, freed = new_pool(), list[int]()
    block, shown = filled(pool)
    outside = shown["matrix"]
    shown.clear()
    kept = LAYOUT.without(["matrix", "last"]).pages(PAGE)
    retained = LAYOUT.without(["norm", "last"]).pages(PAGE) - kept
    monkeypatch.setattr(weight_buffer, "finish_queued_work", lambda device: wait_for_the_janitor())
    gone = LAYOUT.page_count(PAGE) - len(kept | retained)
    assert block.shrink(["matrix", "last"], freed.append, keep=kept) == gone > 0
    assert freed == []
    assert pool.pages_of("retained") == len(retained)
    pool.check()
    del outside
    wait_for_the_janitor()
    assert freed == [len(retained)]
    block.close()


def test_pages_that_a_tensor_outside_shows_are_taken_back_with_what_they_hold() -> None:
    pool, freed = new_pool(), list[int]()
    block, shown = filled(pool)
    outside, slots = shown.pop("matrix"), set(range(LAYOUT.page_count(PAGE)))
    shown.clear()
    kept = LAYOUT.without(["matrix"]).pages(PAGE)
    assert block.shrink(["matrix"], freed.append, keep=kept) == 0
    assert pool.pages_of("retained") == len(slots - kept)
    assert block.adopt(slots - kept, "layer:0") == len(slots - kept)
    assert (pool.pages_of("retained"), block.unmapped_pages) == (0, 0)
    assert bool((outside == 1).all())
    pool.check()
    del outside
    wait_for_the_janitor()
    assert freed == []
    assert bool((block.show(LAYOUT)["matrix"] == 1).all())
    block.close()
