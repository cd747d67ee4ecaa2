"""Layers that move among the memories of instances at random: what was written is read, what was promised is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from elastic.engines.core.kv_state import KVFormat, LayersKV
from elastic.engines.executor.kv_copy import copy_layers
from elastic.errors import CapacityError
from elastic.kvcache.storage.budget import WeightsShare
from elastic.kvcache.storage.guest import GuestMemory
from elastic.kvcache.storage.paged import BlockMemory
from elastic.kvcache.storage.pool import KVPool
from elastic.kvcache.storage.sector_space import BlockGroup, Sector, SectorSpace
from elastic.memory.backends.memfd import MemfdBackend
from elastic.memory.pages.page_pool import PagePool
from support.faulty_backend import FaultyBackend

PAGE, BLOCK = 4096, 2048
LAYERS = range(4)
PAGES = {"a": 96, "b": 84, "c": 110}
WEIGHTS = 16  # pages of each rank that are not the cache's at first
LAYOUTS = {"one kind": ([tuple(LAYERS)], 1), "two kinds": ([(0, 2, 3), (1,)], 1), "parts": ([(0, 1), (2, 3)], 2)}
"""The groups, and in how many parts a decoder layer is: so many layers of the memory."""


@dataclass
class Move:
    """Layers of a home that are copied from one rank to another while steps go on."""

    layers: tuple[int, ...]
    source: str
    target: str
    written: set[tuple[int, int]] = field(default_factory=set)
    """(group, block), since they were copied whole."""


@dataclass
class Home:
    """What an instance must find in its blocks, wherever they are."""

    memory: BlockMemory
    owner: list[str]
    """Of each layer the rank that has its KV."""
    promised: int = 0
    allotted: int | None = None
    used: set[Sector] = field(default_factory=set)
    content: dict[tuple[int, int], int] = field(default_factory=dict)
    """(group, block) -> what is in all of its bytes, plus the layer."""
    guests: dict[str, GuestMemory] = field(default_factory=dict)
    move: Move | None = None


class LayersMachine(RuleBasedStateMachine):
    """Each rank has a pool, in which its own instance has a memory beside those of guests."""

    layout = "one kind"

    @initialize(ranks=st.integers(2, 3), cap=st.integers(2, 6))
    def begin(self, ranks: int, cap: int) -> None:
        """All ranks are in one group: each has pages for the sectors of another one's instance."""
        groups, parts = LAYOUTS[self.layout]
        self.form = KVFormat(8, "head_centric", "float32", 2, 16, tuple((layers, None) for layers in groups), parts)
        assert self.form.block_bytes == BLOCK
        self.groups = [BlockGroup(layers, BLOCK, parts) for layers in groups]
        self.pools: dict[str, KVPool] = {}
        self.homes: dict[str, Home] = {}
        self.weights = dict.fromkeys(list(PAGES)[:ranks], 0)
        self.value = 0
        for rank in self.weights:
            total = PAGES[rank] * PAGE
            backend: Any = FaultyBackend(MemfdBackend(PAGE))
            pool = PagePool(f"cpu#{rank}", backend, total, ready_pages=0)
            kv = self.pools[rank] = KVPool(pool, total, idle_share=0.5, ready_share=0)
            memory = BlockMemory(kv, self.groups, promised=lambda rank=rank: self.promised(rank))
            self.homes[rank] = Home(memory, [rank] * len(LAYERS))
            assert self.take(rank, WEIGHTS)
        for name, guest in zip(self.homes, [*list(self.homes)[1:], "a"], strict=True):
            self.homes[name].memory.set_cap(cap)
            self.open_guest(name, guest)
            self.admit_to(self.homes[name], cap, [0] * (cap - 1))
            self.write(name, [(0, 0), (cap - 2, 1)])

    def promised(self, rank: str) -> int:
        return self.homes[rank].promised if rank in self.homes else 0

    def memory_at(self, home: str, rank: str) -> SectorSpace:
        return self.homes[home].memory if home == rank else self.homes[home].guests[rank]

    # -- requests

    @rule(data=st.data(), sectors=st.integers(1, 6), now=st.lists(st.integers(0, 1), max_size=4))
    def admit(self, data: Any, sectors: int, now: list[int]) -> None:
        """A request comes, and gets some of its sectors, of these groups."""
        self.admit_to(self.homes[self.draw_rank(data)], sectors, now)

    @precondition(lambda self: any(home.promised for home in self.homes.values()))
    @rule(data=st.data(), groups=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def grow(self, data: Any, groups: list[int]) -> None:
        """A request gets what it was promised."""
        promised = sorted(name for name, home in self.homes.items() if home.promised)
        self.grow_at(self.homes[data.draw(st.sampled_from(promised))], groups)

    def admit_to(self, home: Home, sectors: int, now: list[int]) -> None:
        if home.memory.room(growing=False) - home.promised >= sectors:
            home.promised += sectors
            self.grow_at(home, now)

    def grow_at(self, home: Home, groups: list[int]) -> None:
        for group in groups[: home.promised]:
            group = min(group, len(self.groups) - 1)
            sector = home.memory.allocate(group)
            home.promised -= 1
            assert (group, sector) not in home.used
            home.used.add((group, sector))

    @precondition(lambda self: any(home.used for home in self.homes.values()))
    @rule(data=st.data(), places=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 7)), min_size=1, max_size=6))
    def step(self, data: Any, places: list[tuple[int, int]]) -> None:
        """Write blocks in all layers, where these are."""
        self.write(data.draw(st.sampled_from(sorted(name for name, home in self.homes.items() if home.used))), places)

    def write(self, name: str, places: list[tuple[int, int]]) -> None:
        """`places`: sectors in use, and blocks in them, by number."""
        home = self.homes[name]
        self.tell_guests(name)
        for number, place in places if home.used else ():
            group, sector = sorted(home.used)[number % len(home.used)]
            size = home.memory.blocks_per_sector(group)
            block = sector * size + place % size
            self.value = home.content[group, block] = (self.value + 1) % 200
            for layer in self.groups[group].layers:
                self.block(name, home.owner[layer], layer, block)[:] = self.value + layer
            if home.move is not None:
                home.move.written.add((group, block))

    @precondition(lambda self: any(home.used for home in self.homes.values()))
    @rule(data=st.data(), most=st.integers(1, 5), promised=st.integers(0, 2))
    def end(self, data: Any, most: int, promised: int) -> None:
        """Requests end, with sectors, and with what they were promised."""
        home = self.homes[data.draw(st.sampled_from(sorted(name for name, home in self.homes.items() if home.used)))]
        home.promised -= min(home.promised, promised)
        for group, sector in data.draw(st.permutations(sorted(home.used)))[:most]:
            home.used.remove((group, sector))
            size = home.memory.blocks_per_sector(group)
            for block in range(sector * size, (sector + 1) * size):
                home.content.pop((group, block), None)
            home.memory.free(group, sector)

    # -- memory

    def take(self, rank: str, pages: int) -> bool:
        kv = self.pools[rank]
        if not WeightsShare(kv).take_from_cache(pages):
            return False
        kv.pool.reserve("layer", pages)
        self.weights[rank] += pages
        return True

    @rule(data=st.data(), pages=st.integers(1, 12))
    def weights_come(self, data: Any, pages: int) -> None:
        self.take(self.draw_rank(data), pages)

    @rule(data=st.data(), pages=st.integers(1, 12))
    def weights_leave(self, data: Any, pages: int) -> None:
        rank = self.draw_rank(data)
        pages = min(pages, self.weights[rank])
        self.pools[rank].pool.unreserve("layer", pages)
        self.weights[rank] -= pages
        WeightsShare(self.pools[rank]).give_to_cache(pages)

    @rule(data=st.data(), pages=st.sampled_from([0, 24, 60, 200, 200]))
    def resize(self, data: Any, pages: int) -> None:
        kv = self.pools[self.draw_rank(data)]
        limit = min(pages, kv.limits.maximum)
        expected = kv.dry_run_resize(limit * PAGE)[0]
        assert kv.resize(limit * PAGE).status == expected

    @rule(data=st.data())
    def trim(self, data: Any) -> None:
        self.pools[self.draw_rank(data)].trim()

    # -- groups

    def tell_guests(self, name: str) -> None:
        """Have guests map what the home has mapped: none may refuse."""
        home = self.homes[name]
        mapped, unmapped = home.memory.changes()
        for guest in home.guests.values():
            guest.unmap(unmapped)
            guest.map(mapped)
            assert set(guest.mapped_sectors) == set(home.memory.mapped_sectors)

    @rule(data=st.data())
    def join(self, data: Any) -> None:
        """A rank makes room for the sectors of another one's instance."""
        name, rank = self.draw_rank(data), self.draw_rank(data)
        home = self.homes[name]
        if rank == name or rank in home.guests:
            return
        if home.allotted is None:
            home.memory.set_cap(home.memory.capacity)
        if home.allotted is not None or home.memory.reached_cap():
            self.open_guest(name, rank)
        else:
            home.memory.set_cap(None)

    def open_guest(self, name: str, rank: str) -> None:
        home = self.homes[name]
        if home.allotted is None:
            home.allotted = home.memory.cap.sectors
        assert home.allotted is not None
        guest = GuestMemory(self.pools[rank], self.groups, home.memory.sectors)
        guest.allot(home.allotted)
        self.tell_guests(name)
        guest.map(home.memory.mapped_sectors)
        home.guests[rank] = guest

    @rule(data=st.data())
    def part(self, data: Any) -> None:
        """Guests that have no layer leave."""
        name = self.draw_rank(data)
        home = self.homes[name]
        for rank in [rank for rank, guest in home.guests.items() if not guest.layers]:
            home.guests.pop(rank).close()
        if not home.guests:
            home.allotted = None
            home.memory.set_cap(None)

    @rule(data=st.data(), more=st.integers(1, 8))
    def raise_cap(self, data: Any, more: int) -> None:
        home = self.homes[self.draw_rank(data)]
        if home.allotted is None or home.allotted + more > home.memory.sectors:
            return
        try:
            for guest in home.guests.values():
                guest.allot(home.allotted + more)
        except CapacityError:
            for guest in home.guests.values():
                guest.allot(home.allotted)
        else:
            home.allotted += more
            home.memory.set_cap(home.allotted)

    @rule(data=st.data(), cap=st.integers(0, 12))
    def lower_cap(self, data: Any, cap: int) -> None:
        home = self.homes[self.draw_rank(data)]
        if home.allotted is not None:
            home.memory.set_cap(min(cap, home.allotted))

    @rule(data=st.data())
    def reach_cap(self, data: Any) -> None:
        name = self.draw_rank(data)
        home = self.homes[name]
        if home.allotted is not None and home.memory.reached_cap():
            assert home.memory.cap.sectors is not None
            home.allotted = home.memory.cap.sectors
            self.tell_guests(name)
            for guest in home.guests.values():
                guest.allot(home.allotted)

    @precondition(lambda self: any(home.guests and home.move is None for home in self.homes.values()))
    @rule(data=st.data(), fault=st.sampled_from([None, None, "create", "map", "unmap"]), nth=st.integers(1, 3))
    def begin_move(self, data: Any, fault: str | None, nth: int) -> None:
        """A rank that has none of these layers gets pages for them, and a first copy; or the driver refuses it."""
        self.prepare(data, fault, nth)

    @precondition(lambda self: any(home.guests and home.move is None for home in self.homes.values()))
    @rule(data=st.data(), places=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 7)), max_size=3))
    def move(self, data: Any, places: list[tuple[int, int]]) -> None:
        """The same, a step, and the end of it."""
        name = self.prepare(data)
        if self.homes[name].move is not None:
            self.write(name, places)
            self.finish(name, complete=True)

    @precondition(lambda self: any(home.move for home in self.homes.values()))
    @rule(data=st.data(), complete=st.sampled_from([True, True, True, False]))
    def end_move(self, data: Any, complete: bool) -> None:
        """The target copies what was written since, and has the layers; or it gives them up again."""
        name = data.draw(st.sampled_from(sorted(name for name, home in self.homes.items() if home.move)))
        self.finish(name, complete)

    def prepare(self, data: Any, fault: str | None = None, nth: int = 1) -> str:
        can = sorted(name for name, home in self.homes.items() if home.guests and home.move is None)
        name = str(data.draw(st.sampled_from(can)))
        home = self.homes[name]
        source = data.draw(st.sampled_from(sorted(set(home.owner))))
        target = data.draw(st.sampled_from(sorted({name, *home.guests} - {source})))
        there = [layer for layer in LAYERS if home.owner[layer] == source]
        layers = tuple(data.draw(st.sets(st.sampled_from(there), min_size=1)))
        self.tell_guests(name)
        before = self.memory_at(name, target).layers
        backend: Any = self.pools[target].pool.backend
        if fault is not None:
            backend.fail(fault, nth)
        try:
            if target == name:
                home.memory.add_layers(layers)
            else:
                home.guests[target].map(home.memory.mapped_sectors)
                home.guests[target].add_layers(layers)
        except CapacityError:
            assert self.memory_at(name, target).layers == before
            return name
        finally:
            backend.disarm()
        home.move = Move(layers, source, target)
        self.tell_guests(name)
        copy_layers(self.memory_at(name, target), self.located(name, source, layers), layers)
        return name

    def finish(self, name: str, complete: bool) -> None:
        home = self.homes[name]
        move, home.move = home.move, None
        assert move is not None
        self.tell_guests(name)
        if complete:
            groups = range(len(self.groups))
            blocks = [sorted(block for group, block in move.written if group == one) for one in groups]
            source = self.located(name, move.source, move.layers)
            copy_layers(self.memory_at(name, move.target), source, move.layers, blocks)
            for layer in move.layers:
                home.owner[layer] = move.target
        gone = self.memory_at(name, move.source if complete else move.target)
        assert isinstance(gone, BlockMemory | GuestMemory)
        free = gone.kv.pool.free_pages
        assert gone.remove_layers(move.layers) == gone.kv.pool.free_pages - free

    # -- inside

    def draw_rank(self, data: Any) -> str:
        return str(data.draw(st.sampled_from(sorted(self.homes))))

    def located(self, home: str, rank: str, layers: tuple[int, ...]) -> LayersKV:
        memory = self.memory_at(home, rank)
        shared = memory.kv.pool.backend.shared_file()
        assert shared is not None
        return LayersKV(shared, PAGE, self.form, memory.layer_pages(layers))

    def block(self, home: str, rank: str, layer: int, block: int) -> torch.Tensor:
        memory = self.memory_at(home, rank)
        view = memory.groups[memory.group_of(layer)].view(layer, torch.uint8)
        return view[block * BLOCK : (block + 1) * BLOCK]

    # -- what always holds

    @invariant()
    def what_was_written_is_read(self) -> None:
        for name, home in getattr(self, "homes", {}).items():
            for (group, block), value in home.content.items():
                for layer in self.groups[group].layers:
                    found = self.block(name, home.owner[layer], layer, block)
                    assert bool((found == value + layer).all()), (name, layer, block)

    @invariant()
    def all_requests_can_end(self) -> None:
        for home in getattr(self, "homes", {}).values():
            assert home.memory.room(growing=True) >= home.promised
            if home.allotted is not None:
                assert home.memory.mapped_count <= home.allotted
                assert home.memory.sectors_in_use + home.promised <= home.allotted

    @invariant()
    def the_ledger_is_exact(self) -> None:
        for rank, kv in getattr(self, "pools", {}).items():
            kv.check()
            assert kv.pool.pages_of("kv") == kv.usage.used + kv.usage.idle + kv.reserved
            assert kv.pool.pages_of("layer") == self.weights[rank]
            guests = [home.guests[rank] for home in self.homes.values() if rank in home.guests]
            assert kv.reserved == sum(guest.usage.promised() for guest in guests)
            assert kv.usage.used + kv.usage.promised() <= kv.limits.maximum

    def teardown(self) -> None:
        for home in getattr(self, "homes", {}).values():
            for guest in home.guests.values():
                guest.close()
            home.memory.close()
        for rank, kv in getattr(self, "pools", {}).items():
            assert kv.pool.free_pages + self.weights[rank] == kv.pool.budget_pages
            kv.close()
            kv.pool.close()


class TwoKindsMachine(LayersMachine):
    """The same with two groups of layers, whose sectors differ in size when some have left."""

    layout = "two kinds"


class PartsMachine(LayersMachine):
    """The same with two decoder layers of two parts each, in groups of their own."""

    layout = "parts"


MACHINES = pytest.mark.parametrize("machine", [LayersMachine, TwoKindsMachine, PartsMachine])


@MACHINES
def test_layers_move_and_nothing_is_lost(machine: type[LayersMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=15, stateful_step_count=40, deadline=None))


@pytest.mark.long
@MACHINES
def test_layers_move_and_nothing_is_lost_for_ten_thousand_steps(machine: type[LayersMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=200, stateful_step_count=50, deadline=None))
