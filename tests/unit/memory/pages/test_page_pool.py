"""The ledger: pages are conserved and have one owner, whatever happens and whatever fails (laws 4, 5)."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import elastic
from elastic import CapacityError, ConfigError, IntegrityError, StateError
from elastic.config import Place, parse_bytes
from elastic.memory import places
from elastic.memory.backends.base import runs
from elastic.memory.backends.memfd import MemfdBackend
from elastic.memory.pages.background import janitor
from elastic.memory.pages.page_pool import PagePool
from elastic.memory.pages.virtual_range import VirtualRange
from support.child_process import wait_for_the_janitor
from support.faulty_backend import CALLS, FaultyBackend

PAGE = 4096
BUDGET = 40
ACTIONS = int(os.environ.get("ELASTIC_LEDGER_ACTIONS", "10000"))
FEW_ACTIONS = 3000
STEPS = 100


def new_pool(pages: int = BUDGET, pages_per_huge_page: int = 1, ready_pages: int = 0) -> PagePool:
    backend = MemfdBackend(PAGE)
    backend.pages_per_huge_page = pages_per_huge_page
    return PagePool("cpu#test", FaultyBackend(backend), pages * PAGE, ready_pages=ready_pages)


def test_addresses_are_reserved_while_nobody_else_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, locked = new_pool(), list[bool]()
    reserve = pool.backend.reserve

    def look() -> None:
        if free := pool.mapping_lock.acquire(blocking=False):
            pool.mapping_lock.release()
        locked.append(not free)

    def note(nbytes: int, **options: Any) -> int:
        other = threading.Thread(target=look)
        other.start()
        other.join()
        return reserve(nbytes, **options)

    monkeypatch.setattr(pool.backend, "reserve", note)
    VirtualRange(pool, 2).close()
    assert locked == [True]
    pool.close()


class Shown:
    """A range that shows free pages, until somebody takes them."""

    def __init__(self, pool: PagePool, capacity: int) -> None:
        self.pool = pool
        self.range = VirtualRange(pool, capacity)

    def reclaim(self, count: int) -> int:
        slots = list(self.range.slots)[:count]
        for slot in slots:
            self.pool.free(self.range.unmap(slot, 1))
        if not self.range.slots:
            self.pool.unregister_holder(self.reclaim)
        return len(slots)


class Ledger(RuleBasedStateMachine):
    """Random actions on a pool and its ranges, any backend call of which may fail, against a plain model of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.pool: PagePool
        self.ranges: list[VirtualRange] = []
        self.bytes: list[dict[int, int]] = []  # for each range: slot -> what was written there
        self.charged = 0
        self.held = 0
        self.shown: list[Shown] = []

    @initialize(pages_per_huge_page=st.sampled_from([1, 3, 8, 64]))
    def begin(self, pages_per_huge_page: int) -> None:
        self.pool = new_pool(pages_per_huge_page=pages_per_huge_page)

    def try_(self, action: Any) -> bool:
        """Do it; a failure must leave everything as it was."""
        before = self.pool.status(), [dict(r.slots) for r in self.ranges]
        try:
            action()
        except CapacityError:
            after = self.pool.status(), [dict(r.slots) for r in self.ranges]
            assert after[0].owners == before[0].owners
            assert after[1] == before[1]
            return False
        return True

    @rule(call=st.sampled_from(CALLS), nth=st.integers(1, 3), half_way=st.booleans())
    def arm_a_failure(self, call: str, nth: int, half_way: bool) -> None:
        self.pool.backend.fail(call, nth, half_way=half_way)  # type: ignore[attr-defined]

    @rule(capacity=st.integers(1, 12), gaps=st.booleans())
    def reserve(self, capacity: int, gaps: bool) -> None:
        def act() -> None:
            self.ranges.append(VirtualRange(self.pool, capacity, readable_gaps=gaps))
            self.bytes.append({})

        if len(self.ranges) < 6:
            self.try_(act)

    @rule(data=st.data())
    def map(self, data: st.DataObject) -> None:
        index = self.pick(data)
        if index is None:
            return
        range_ = self.ranges[index]
        free = [slot for slot in range(range_.capacity) if slot not in range_.slots]
        if not free:
            return
        slot = data.draw(st.sampled_from(free))
        count = 1
        while count < 4 and slot + count in free:
            count += 1

        huge_pages = data.draw(st.booleans())

        def act() -> None:
            pages = self.pool.allocate("kv", count, huge_pages=huge_pages)
            try:
                range_.map(slot, pages)
            except CapacityError:
                self.pool.free(pages)
                raise

        if self.try_(act):
            for i in range(slot, slot + count):
                value = data.draw(st.integers(1, 255))
                self.page(range_, i).fill_(value)
                self.bytes[index][i] = value

    @rule(data=st.data())
    def unmap(self, data: st.DataObject) -> None:
        index = self.pick(data)
        if index is None or not self.ranges[index].slots:
            return
        first, count = data.draw(st.sampled_from(runs(sorted(self.ranges[index].slots))))
        count = data.draw(st.integers(1, count))
        if self.try_(lambda: self.pool.free(self.ranges[index].unmap(first, count))):
            for i in range(first, first + count):
                del self.bytes[index][i]

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        index = self.pick(data)
        if index is None or self.ranges[index].slots:
            return
        if self.try_(self.ranges[index].close):
            del self.ranges[index], self.bytes[index]

    @rule(data=st.data(), owner=st.sampled_from(["kv", "retained", "layer:0"]))
    def move(self, data: st.DataObject, owner: str) -> None:
        index = self.pick(data)
        if index is not None:
            self.pool.reassign(self.ranges[index].slots.values(), owner)

    @rule(pages=st.integers(1, 6))
    def charge(self, pages: int) -> None:
        if self.try_(lambda: self.pool.charge("fixed:head", pages * PAGE)):
            self.charged += pages

    @rule()
    def discharge(self) -> None:
        self.pool.discharge("fixed:head", self.charged * PAGE)
        self.charged = 0

    @rule(pages=st.integers(1, 12))
    def reserve_pages(self, pages: int) -> None:
        if self.try_(lambda: self.pool.reserve("staging", pages)):
            self.held += pages

    @rule()
    def unreserve_pages(self) -> None:
        self.pool.unreserve("staging", self.held)
        self.held = 0

    @rule(count=st.integers(1, 12))
    def mark_reclaimable(self, count: int) -> None:
        def act() -> None:
            shown = Shown(self.pool, count)
            self.shown.append(shown)
            pages = self.pool.allocate("layer:1", count)
            try:
                shown.range.map(0, pages)
            except CapacityError:
                self.pool.free(pages)
                raise
            self.pool.mark_reclaimable(pages, shown.reclaim)

        self.try_(act)

    @rule(keep=st.integers(0, 8))
    def trim(self, keep: int) -> None:
        self.try_(lambda: self.pool.trim(keep))

    @rule(ready=st.integers(0, 12), huge_pages=st.booleans())
    def make_ready(self, ready: int, huge_pages: bool) -> None:
        self.pool.ready_pages = ready
        self.try_(lambda: self.pool.make_ready(ready, huge_pages=huge_pages))
        self.pool.ready_pages = 0

    @invariant()
    def the_books_agree(self) -> None:
        self.pool.check()
        status = self.pool.status()
        assert sum(status.owners.values()) + status.free_bytes == status.budget_bytes == BUDGET * PAGE
        assert min(status.idle_bytes, status.parked_bytes) >= 0
        assert status.idle_bytes + status.parked_bytes <= status.free_bytes

    @invariant()
    def no_byte_has_changed(self) -> None:
        for range_, written in zip(self.ranges, self.bytes, strict=True):
            for slot, value in written.items():
                assert self.page(range_, slot).unique().tolist() == [value]

    def teardown(self) -> None:
        self.pool.backend.disarm()  # type: ignore[attr-defined]
        for shown in self.shown:
            shown.reclaim(BUDGET)
        for range_ in [*self.ranges, *(shown.range for shown in self.shown)]:
            range_.close()
        self.pool.check()
        self.pool.close()
        assert self.pool.backend.created == 0

    def pick(self, data: st.DataObject) -> int | None:
        return data.draw(st.integers(0, len(self.ranges) - 1)) if self.ranges else None

    def page(self, range_: VirtualRange, slot: int) -> torch.Tensor:
        return range_.storage(slot, PAGE, lambda: None).tensor(torch.uint8)


@pytest.mark.slow
@pytest.mark.parametrize("actions", [FEW_ACTIONS, pytest.param(ACTIONS, marks=pytest.mark.long)], ids=["few", "many"])
def test_the_ledger_is_that_of_a_plain_model_of_bytes(actions: int) -> None:
    run_state_machine_as_test(
        Ledger,
        settings=settings(
            max_examples=actions // STEPS,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_recount_finds_what_is_wrong() -> None:
    pool = new_pool()
    range_ = VirtualRange(pool, 4)
    range_.map(0, pool.allocate("kv", 2))
    pool.check()
    page = range_.slots.pop(0)
    with pytest.raises(IntegrityError, match="mapped pages and owned and reclaimable pages differ"):
        pool.check()
    range_.slots[0] = range_.slots[1]
    with pytest.raises(IntegrityError, match="more than once"):
        pool.check()
    range_.slots[0] = page
    pool.check()
    range_.close()
    pool.close()


def test_blocks_stay_whole_as_long_as_other_pages_will_do() -> None:
    pool = new_pool(23, pages_per_huge_page=8, ready_pages=6)
    layer = pool.allocate("layer:0", 10, huge_pages=True)
    assert (layer, len(pool.cached)) == ([*range(10)], 6)  # what was created of the second block besides
    pool.ready_pages = 0
    kv = pool.allocate("kv", 5)
    assert kv == [*range(10, 15)]
    pool.free(layer)
    assert pool.allocate("kv", 3) == [8, 9, 15]
    assert pool.allocate("layer:1", 9, huge_pages=True) == [*range(8), 16]
    assert pool.make_ready(9, huge_pages=True) == 6
    pool.free(kv)
    assert pool.make_ready(9, huge_pages=True) == 0  # there is no block to create
    with pytest.raises(CapacityError):
        pool.allocate("kv", 12)
    assert pool.status().owners == {"kv": 3 * PAGE, "layer:1": 9 * PAGE}


def test_too_few_pages_is_an_error_that_says_who_has_them() -> None:
    pool = new_pool(8)
    pool.charge("fixed:head", 3 * PAGE)
    with pytest.raises(CapacityError, match=r"fixed:head: 12,288 bytes.*larger budget") as error:
        pool.allocate("kv", 6)
    assert (error.value.requested_bytes, error.value.free_bytes) == (6 * PAGE, 5 * PAGE)
    assert error.value.total_bytes == 8 * PAGE
    pool.close()
    with pytest.raises(StateError, match="closed"):
        pool.allocate("kv", 1)


def test_pages_are_created_ahead_in_the_background() -> None:
    pool = PagePool("cpu#test", MemfdBackend(PAGE), BUDGET * PAGE, ready_pages=5)
    janitor.start()
    pages = pool.allocate("kv", 1)
    wait_for_the_janitor()
    assert len(pool.cached) == 5
    pool.free(pages)
    pool.close()
    assert pool.backend.created == 0


def test_a_reclaimer_is_asked_before_the_budget_is_short() -> None:
    pool = new_pool(4)
    held = pool.allocate("kv", 4)
    asked: list[int] = []

    def reclaim(pages: int) -> int:
        asked.append(pages)
        pool.free([held.pop() for _ in range(pages)])
        return pages

    pool.reclaimers.append(reclaim)
    taken = pool.allocate("kv", 2)
    assert asked == [2]
    pool.free([*held, *taken])
    pool.close()


def test_places_are_shared_by_name_and_closed_by_the_last_user() -> None:
    first = places.open_place(Place.parse("cpu#a=1MiB"))
    assert places.open_place(Place.parse("cpu#a")) is first
    with pytest.raises(ConfigError, match="cannot replace it"):
        places.open_place(Place.parse("cpu#a=2MiB"))
    other = places.open_place(Place.parse("cpu#b=1MiB"))
    assert other is not first
    for pool in (first, first, other):
        places.close_place(pool)
    assert not places._open


@pytest.mark.parametrize(
    ("text", "expected"), [(5, 5), ("0", 0), ("64", 64), ("4GiB", 4 << 30), ("1.5 MB", 1_500_000), ("2KiB", 2048)]
)
def test_sizes(text: Any, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", [-1, True, 1.5, "4 gigs", "", "-1GiB", None])
def test_what_is_no_size_is_refused_by_name(text: Any) -> None:
    with pytest.raises(ConfigError, match="budget="):
        parse_bytes(text, option="budget")


def test_place_texts() -> None:
    assert Place.parse("cuda:1=20GiB") == Place("cuda:1", torch.device("cuda:1"), 20 << 30)
    assert Place.parse("cpu#0=1GiB").name == "cpu#0"
    assert Place.parse("cuda#a").device == torch.device("cuda:0")
    assert Place.parse("cpu#0=1GiB/2MiB") == Place("cpu#0", torch.device("cpu"), 1 << 30, 2 << 20)
    assert Place.parse("cpu/4096") == Place("cpu", torch.device("cpu"), None, 4096)
    for bad in ("cpu:1", "tpu", "cuda:x", "cpu#0=lots", "cpu=1GiB/", "cpu=1GiB/few", "cpu/0", 3):
        with pytest.raises(elastic.ConfigError):
            Place.parse(bad)  # type: ignore[arg-type]


def test_pages_that_come_back_after_the_close_go_to_the_system() -> None:
    """As where a tensor outside showed them until then."""
    pool = new_pool(8)
    pages = pool.allocate("layer:0", 3)
    pool.close()
    assert pool.backend.created == 3
    pool.free(pages)
    assert pool.backend.created == 0


def test_pages_that_are_held_back_are_nobodys_to_take() -> None:
    pool = new_pool(8)
    pages = pool.allocate("kv", 3)
    pool.reserve("staging", 4)
    assert (pool.free_pages, pool.pages_of("staging"), pool.status().owners["staging"]) == (1, 4, 4 * pool.page_bytes)
    with pytest.raises(CapacityError, match="staging"):
        pool.allocate("kv", 2)
    with pytest.raises(CapacityError):
        pool.reserve("staging", 2)
    pool.free(pages)
    pool.check()
    assert len(pool.allocate("kv", 4)) == 4
    pool.unreserve("staging", 4)
    assert len(pool.allocate("kv", 4)) == 4


def test_pages_that_are_being_created_are_waited_for_where_all_are_needed() -> None:
    """Else they would be above the budget once they are there."""
    pool = new_pool(8)
    pool.ready_pages = 2
    begun, go, create = threading.Event(), threading.Event(), pool.backend.create

    def slowly(pages: Any) -> None:
        begun.set()
        assert go.wait(60)
        create(pages)

    pool.backend.create = slowly  # type: ignore[method-assign]
    creating = threading.Thread(target=pool.replenish)
    creating.start()
    assert begun.wait(60)
    taken: list[int] = []
    taking = threading.Thread(target=lambda: taken.extend(pool.allocate("kv", 8)))
    taking.start()
    taking.join(0.05)
    go.set()
    creating.join(60)
    taking.join(60)
    assert sorted(taken) == list(range(8))
    assert (len(pool.cached), pool.free_pages) == (0, 0)
    pool.free(taken)
    pool.check()
    pool.close()


def test_ranges_are_made_by_other_threads_only_while_nothing_is_recounted() -> None:
    pool = new_pool()
    held: list[bool] = []

    class Ranges(weakref.WeakSet[Any]):
        def add(self, item: Any) -> None:
            held.append(pool.mapping_lock._is_owned())  # type: ignore[attr-defined]
            super().add(item)

        def __iter__(self) -> Iterator[Any]:
            held.append(pool.mapping_lock._is_owned())  # type: ignore[attr-defined]
            return super().__iter__()

    pool.ranges = Ranges()
    made = VirtualRange(pool, 1)
    pool.check()
    assert held == [True, True]
    made.close()
    pool.close()
