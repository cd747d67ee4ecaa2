"""Room that is kept for a drop takes no request's: what fits a rank is served, what never does is refused at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from elastic import CapacityError, Overloaded
from elastic.cluster.control.messages import Refused, Submit
from elastic.cluster.control.stage_questions import MeasureRoom, Room, SetCap
from elastic.cluster.fleet.fleet import Fleet
from elastic.engines.base import Request
from elastic.engines.core.kv_state import KVFormat, KVSource
from elastic.engines.core.load import EngineLoad
from support.cluster.fake_group import LAYERS, GroupRank
from support.cluster.fake_rank import BLOCK, FakeLauncher, made_worlds
from support.serving.generations import Collector

PAGE = 4096
ONE = KVFormat(BLOCK, "head_centric", "float32", 2, 8, ((tuple(range(LAYERS)), None),))
TWO = KVFormat(BLOCK, "head_centric", "float32", 2, 8, (((0, 1, 2), None), ((3, 4, 5), 2 * BLOCK)))
SECTOR = PAGE // ONE.block_bytes
"""Blocks of a sector, of each group."""


class LimitedRank(GroupRank):
    """A rank that takes what fits its limit and its cap by itself, as an engine does, and counts sectors by group."""

    def __init__(self, name: str, world: dict[str, GroupRank], kv: KVFormat, sectors: int) -> None:
        super().__init__(name, world)
        self.limit = self.most = sectors
        self.refusals: list[str] = []
        assert self.hello.memory is not None
        memory = KVSource(self.hello.memory.file, PAGE, kv)
        sizes = (SECTOR,) * len(kv.groups)
        self.hello = replace(self.hello, kv=kv, memory=memory, sector_blocks=sizes, load=self.load())
        self.committed = 0

    def sectors_for(self, tokens: int) -> int:
        sizes = (tokens if window is None else min(tokens, window) for window in self.hello.kv.windows)
        return sum(-(-size // (SECTOR * BLOCK)) for size in sizes)

    @property
    def capacity(self) -> int:
        return self.limit if self.cap is None else min(self.limit, self.cap)

    def load(self) -> EngineLoad:
        requests = [state.request for states in self.live.values() for state in states]
        used = sum(self.sectors_for(len(request.prompt) + request.max_tokens) for request in requests)
        free = max(0, self.capacity - used) * SECTOR
        total, uncapped = self.capacity * SECTOR, self.limit * SECTOR
        return EngineLoad(len(requests), 0, free, total, self.steps, uncapped_blocks=uncapped)

    def on_measure_room(self, question: MeasureRoom) -> Room:
        pages = LAYERS // len(self.hello.kv.groups) * self.limit
        return replace(super().on_measure_room(question), pages=pages)

    def on_set_cap(self, question: SetCap) -> EngineLoad:
        self.cap = question.sectors
        return self.load()

    def take(self) -> None:
        for message in [each for each in self.inbox if isinstance(each, Submit)]:
            request = message.states[0].request
            sectors = self.sectors_for(len(request.prompt) + request.max_tokens)
            if sectors > self.capacity:
                self.inbox.remove(message)
                error = Overloaded("while the limit is so", retry_after_s=1.0)
                never = CapacityError("never", requested_bytes=1, free_bytes=0, total_bytes=0)
                self.refusals.append(request.id)
                self.on_message(Refused(request.id, error if sectors <= self.most else never))
        super().take()


class World:
    """A fleet of such ranks, whose policies do nothing by themselves."""

    def __init__(self, kv: KVFormat, sectors: int, ranks: int = 2) -> None:
        world: dict[str, GroupRank] = {}
        launcher = FakeLauncher(lambda spec: LimitedRank(spec.name, world, kv, sectors))
        options: dict[str, Any] = {"beat_timeout_s": 1e6, "hang_timeout_s": 1e6, "replace": False}
        self.fleet = Fleet("no model", ranks=ranks, launch=launcher, **options)
        self.fleet.start()
        self.fleet._policies.stop()
        self.ranks: list[Any] = list(world.values())
        self.heard = Collector()

    @property
    def caps(self) -> list[int | None]:
        return [rank.cap for rank in self.ranks]

    def ask(self, sectors: int, name: str) -> None:
        """Submit a request of so many sectors of the first group."""
        tokens = sectors * SECTOR * BLOCK
        self.fleet.submit(Request((1 + len(name),) * (tokens - 4), 4, ignore_eos=True, id=name), self.heard)

    def limit(self, sectors: int) -> None:
        """Have the limit of all ranks be another, and have them say so."""
        for rank in self.ranks:
            rank.limit = sectors
        self.beat()

    def beat(self) -> None:
        for rank in self.ranks:
            rank.beat()

    def step(self, count: int = 1) -> None:
        """Have the policy look and ranks step, so many times."""
        for _ in range(count):
            self.fleet.keep_staging()
            for rank in self.ranks:
                rank.step()

    def refusals(self) -> list[str]:
        return [name for rank in self.ranks for name in rank.refusals]


@pytest.fixture
def worlds() -> Iterator[Callable[..., World]]:
    yield from made_worlds(World)


def test_nothing_is_kept_where_a_rank_could_not_have_a_sector_for_each_group_of_layers(worlds: Any) -> None:
    world = worlds(TWO, 2)
    world.step()
    assert world.caps == [None, None]
    world.ask(1, "first")
    world.step(8)
    assert world.heard.ends["first"].finish == "length"
    assert world.refusals() == []


def test_where_groups_have_sectors_beside_it_room_is_kept(worlds: Any) -> None:
    world = worlds(TWO, 8)
    world.step()
    assert world.caps == [6, 6]


def test_sectors_of_each_group_are_counted_so_that_no_rank_is_asked_in_vain(worlds: Any) -> None:
    world = worlds(TWO, 3)
    longest = world.fleet.longest_request(1000)
    assert longest == 2 * SECTOR * BLOCK
    tokens = longest + 1
    with pytest.raises(CapacityError, match=f"a request of {tokens} tokens fits in no instance"):
        world.fleet.submit(Request((1,) * (tokens - 4), 4), world.heard)
    world.ask(2, "longest")
    for _ in range(8):
        for rank in world.ranks:
            rank.step()
    assert world.heard.ends["longest"].finish == "length"
    assert world.refusals() == []


def test_a_request_that_every_rank_refuses_has_room_that_is_kept_given_back(worlds: Any) -> None:
    world = worlds(ONE, 7)
    world.step()
    assert world.caps == [6, 6]
    for rank in world.ranks:
        rank.refuses = Overloaded("for a reason of its own", retry_after_s=1.0)
    world.ask(1, "first")
    for _ in range(2):
        for rank in world.ranks:
            rank.step()
    assert world.fleet.status().queued == 1
    world.fleet.keep_staging()
    assert world.caps == [None, None]


def test_a_request_counts_once_however_often_ranks_refuse_it(worlds: Any) -> None:
    world = worlds(ONE, 7)
    for rank in world.ranks:
        rank.refuses = Overloaded("not now", retry_after_s=1.0)
    world.ask(1, "first")
    for _ in range(2):
        for rank in world.ranks:
            rank.step()
    with world.fleet._dispatcher.lock:
        world.fleet._dispatcher.queue[0].refused.clear()
    for rank in world.ranks:
        rank.refuses = None
    world.beat()
    world.step(5)
    assert world.heard.ends["first"].finish == "length"
    totals = world.fleet.status().totals
    assert (totals.routed, totals.prefix_hits) == (1, 0)


def test_with_room_for_one_sector_a_rank_serves_as_without_the_policy(worlds: Any) -> None:
    world = worlds(ONE, 1)
    world.step()
    assert world.caps == [None, None]
    world.ask(1, "first")
    world.step(5)
    assert world.heard.ends["first"].finish == "length"


def test_a_request_that_needs_what_is_kept_waits_for_it_and_is_served(worlds: Any) -> None:
    world = worlds(ONE, 7)
    world.step()
    assert world.caps == [6, 6]
    with pytest.raises(CapacityError, match="fits in no instance"):
        world.ask(8, "too large")
    assert world.fleet.longest_request(1000) == 7 * SECTOR * BLOCK
    world.ask(7, "first")
    assert world.fleet.status().queued == 1
    world.fleet.keep_staging()
    assert world.caps == [None, None]
    assert world.fleet.status().queued == 0
    world.step(6)
    assert world.heard.ends["first"].finish == "length"
    assert world.refusals() == []
    assert world.caps == [6, 6], "room is kept again"


def test_room_that_was_kept_by_hand_is_given_to_who_waits_for_it(worlds: Any) -> None:
    world = worlds(ONE, 7)
    world.fleet.keep_staging()
    assert world.fleet._groups.follow_needs() == 0
    assert world.caps == [6, 6], "nobody waits"
    world.ask(7, "first")
    assert world.fleet._groups.follow_needs() == 0
    assert world.caps == [None, None]
    assert world.fleet.status().queued == 0


def test_no_room_is_kept_anew_while_who_needs_it_waits_for_others(worlds: Any) -> None:
    world = worlds(ONE, 7)
    for name in ("one", "other"):
        world.ask(5, name)
    world.step()
    world.ask(7, "first")
    for _ in range(4):
        world.fleet.keep_staging()
        assert world.caps == [None, None]
    for name in ("one", "other"):
        assert world.fleet.status().queued == 1
        world.fleet.cancel(name)
    world.step(6)
    assert world.heard.ends["first"].finish == "length"
    assert world.caps == [6, 6]


@pytest.mark.parametrize("limit", [3, 6])
def test_a_limit_that_was_lowered_by_hand_counts_though_room_is_kept(worlds: Any, limit: int) -> None:
    world = worlds(ONE, 7)
    world.step()
    world.limit(limit)
    with pytest.raises(Overloaded, match="does not fit while the limits of KV are as they are"):
        world.ask(limit + 1, "too large now")
    world.limit(7)
    world.ask(7, "first")
    world.step(6)
    assert world.heard.ends["first"].finish == "length"


def test_what_is_kept_follows_the_limit_of_a_rank(worlds: Any) -> None:
    world = worlds(ONE, 7)
    world.limit(3)
    world.step()
    assert world.caps == [2, 2]
    world.limit(7)
    world.step()
    assert world.caps == [6, 6]
    asked = sum(len(rank.asked) for rank in world.ranks)
    world.step()
    assert sum(len(rank.asked) for rank in world.ranks) == asked, "nothing has changed: nobody is asked"
    world.ask(6, "first")
    world.step(5)
    assert world.heard.ends["first"].finish == "length"
    world.limit(3)
    world.step()
    assert world.caps == [2, 2]
