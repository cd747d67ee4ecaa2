"""The policy of lengths over groups that keep books: whoever any degree holds has an answer, and all part again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic import CapacityError, ConfigError, StateError
from elastic.cluster.control import stage_questions as ask
from elastic.cluster.control.messages import Submit
from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.groups.caps import reach
from elastic.cluster.fleet.lengths.controller import LengthController
from elastic.config import Lengths
from elastic.engines.base import Request
from elastic.engines.core.load import EngineLoad
from elastic.engines.core.step import SequenceState
from support.cluster.fake_group import ALONE, SECTOR, GroupRank, kv_of
from support.cluster.fake_rank import BLOCK, FakeLauncher
from support.serving.generations import Collector

SHARDS = 4
SECTOR_BLOCKS = SECTOR * 4096 // kv_of(SHARDS).block_bytes
AT_ONCE = Lengths(wait_s=0.0, dwell_s=0.0, cooldown_s=0.0, patience_s=0.0)


def blocks_of(states: Sequence[SequenceState]) -> int:
    return sum(-(-(len(state.request.prompt) + state.request.max_tokens) // BLOCK) for state in states)


class SharingRank(GroupRank):
    """A rank that has as much as its requests need; while it is waited for, all ranks go on."""

    def __init__(self, name: str, world: dict[str, GroupRank]) -> None:
        super().__init__(name, world, SHARDS, SHARDS)
        self.hello = replace(self.hello, load=self.load())

    @property
    def committed(self) -> int:  # type: ignore[override]
        return -(-sum(blocks_of(states) for states in self.live.values()) // SECTOR_BLOCKS)

    @committed.setter
    def committed(self, _: int) -> None:
        pass

    @property
    def limit(self) -> int:
        """Blocks that its requests may have together."""
        return (ALONE if self.cap is None else self.cap) * SECTOR_BLOCKS

    def take(self) -> None:
        """Begin what there is room for, in order; the rest waits here."""
        came, self.inbox = self.inbox, []
        kept: list[Any] = []
        for message in came:
            used = sum(blocks_of(states) for states in self.live.values())
            if isinstance(message, Submit) and (kept or used + blocks_of(message.states) > self.limit):
                kept.append(message)
            else:
                self.inbox = [message]
                super().take()
        self.inbox = kept

    def load(self) -> EngineLoad:
        free = self.limit - sum(blocks_of(states) for states in self.live.values())
        running = sum(map(len, self.live.values()))
        return EngineLoad(running, len(self.inbox), max(0, free), self.limit, self.steps)

    def on_set_cap(self, question: ask.SetCap) -> EngineLoad:
        load = super().on_set_cap(question)
        self.beat()
        return load

    def on_cap_reached(self, _: ask.CapReached) -> bool:
        for rank in list(self.world.values()):
            rank.step()
        return self.cap is None or self.committed <= self.cap


class World:
    """A fleet of such ranks, whose policies do something when the test says so."""

    def __init__(self, ranks: int) -> None:
        world: dict[str, GroupRank] = {}
        launcher: Any = FakeLauncher(lambda spec: SharingRank(spec.name, world))
        self.fleet = Fleet("no model", ranks=ranks, launch=launcher, replace=False, beat_timeout_s=1e6)
        self.fleet.start()
        self.fleet._policies.stop()
        self.ranks, self.heard = [world[name] for name in sorted(world)], Collector()
        self.controller = LengthController(self.fleet._dispatcher, self.fleet, AT_ONCE)
        self.fleet._dispatcher.on_waiting = lambda: None  # as if it had started
        self.controller._measure()
        self.controller._note_reach()
        self.capacity = dict(self.fleet.capacity((1, 2, 4))["r0"])

    def ask(self, blocks: int, name: str, answer: int = 3) -> None:
        self.fleet.submit(Request((1,) * (blocks * BLOCK - answer), answer, ignore_eos=True, id=name), self.heard)

    def go_on(self, times: int = 1) -> None:
        """Decide, change, have limits follow, and compute."""
        for _ in range(times):
            plan = self.controller.tick()
            assert plan is not None
            for change in (*plan.ups, *plan.downs):
                self.controller.change(change)
            self.controller._changing = ()
            self.fleet._groups.follow_needs()
            for rank in self.ranks:
                rank.step()
                assert rank.free() >= 0
            self.fleet.check()

    def end(self, count: int) -> None:
        """Go on until so many have ended, and all instances are by themselves."""
        for _ in range(400):
            if len(self.heard.ends) >= count and not self.fleet.groups():
                return
            self.go_on()

    def close(self) -> None:
        self.controller.stop()
        self.fleet.stop(drain=False)


@pytest.fixture
def worlds() -> Iterator[Any]:
    made: list[World] = []

    def world(ranks: int) -> World:
        made.append(World(ranks))
        return made[-1]

    yield world
    for each in made:
        each.close()


def test_what_a_degree_holds_is_what_an_instance_of_it_can_have(worlds: Any) -> None:
    """All that is left beside one copy of the weights, and what is not cut at each rank."""
    w = worlds(4)
    assert w.capacity[1] == ALONE * SECTOR_BLOCKS
    for degree in (2, 4):
        names = [rank.name for rank in w.ranks[:degree]]
        assert w.fleet.reshard(names, tp=degree).status == "applied"
        sectors = sum(rank.budget - rank.weights() for rank in w.ranks[:degree]) // (SECTOR * 6 * SHARDS)
        assert w.capacity[degree] == sectors * SECTOR_BLOCKS
        assert w.fleet._dispatcher.instances["r0"].group_blocks == w.capacity[degree]
        assert w.fleet.capacity((1, 2, 4))["r0"] == w.capacity, "measured in a group"
        assert w.fleet.reshard("r0", tp=1).status == "applied"


def test_ranks_with_the_same_memory_are_planned_once(worlds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    w, planned = worlds(4), list[object]()
    plan = reach.blocks_by_degree
    monkeypatch.setattr(reach, "blocks_by_degree", lambda *given: planned.append(given) or plan(*given))
    assert w.fleet.capacity((1, 2, 4)) == dict.fromkeys(("r0", "r1", "r2", "r3"), w.capacity)
    assert len(planned) == 1
    w.ranks[2].budget -= SECTOR * 6 * SHARDS
    found = w.fleet.capacity((1, 2, 4))
    assert len(planned) == 3
    assert found["r2"][1] < found["r0"][1] == w.capacity[1]


@pytest.mark.parametrize("degree", [2, 4])
def test_the_longest_request_of_a_degree_is_served_beside_short_ones(worlds: Any, degree: int) -> None:
    w = worlds(degree)
    for number in range(6):
        w.ask(40, f"short{number}")
    w.go_on()
    w.ask(w.capacity[degree], "long")
    w.ask(40, "late")
    with pytest.raises(CapacityError, match="fits in no instance"):
        w.ask(w.capacity[4] + 1, "too long")
    w.end(8)
    assert len(w.heard.ends) == 8
    assert {end.finish for end in w.heard.ends.values()} == {"length"}
    assert w.fleet.groups() == ()
    kinds = [event.kind for event in w.fleet.events() if event.kind in ("resharded", "parted")]
    assert kinds == ["resharded", "resharded", "parted"]


@pytest.mark.parametrize("degree", [0, -1, 2.0, True])
def test_what_is_no_degree_has_no_capacity(worlds: Any, degree: Any) -> None:
    w = worlds(2)
    with pytest.raises(ConfigError, match=f"degrees={degree} cannot be; it must be whole numbers, at least 1"):
        w.fleet.capacity((1, degree))


def test_a_change_that_was_stopped_on_its_way_is_asked_for_again_and_the_long_request_served(worlds: Any) -> None:
    w = worlds(2)
    fails = w.ranks[1]
    fails.fails = lambda question: StateError("no") if isinstance(question, ask.FlipLayers) else None
    w.ask(w.capacity[2], "long")
    w.go_on(3)
    (group,) = w.fleet.groups()
    assert {name: path.helpers for name, path in group.paths.items()} == {"r0": ("r1",), "r1": ()}
    assert w.fleet.status().queued == 1, "the two have no room for it yet"
    kinds = [event.kind for event in w.fleet.events()]
    assert kinds.count("reshard failed") == 3
    fails.fails = lambda question: None
    w.end(1)
    assert w.heard.ends["long"].finish == "length"
    assert w.fleet.groups() == ()


def test_ranks_part_when_each_holds_what_it_has_begun_and_not_before(worlds: Any) -> None:
    """Asked before, they would wait for its requests with lower limits, and keep other ranks from changing."""
    w = worlds(2)
    assert w.fleet.reshard(["r0", "r1"], tp=2).status == "applied"
    for name in ("one", "two"):
        w.ask(81, name)
        with w.fleet._dispatcher.lock:
            assert w.fleet._dispatcher.place(w.fleet._dispatcher.queue[0], ("r0",))
    for rank in w.ranks:
        rank.step()
    assert w.capacity[1] < 162 < w.capacity[2] / 2, "half is free"
    assert w.controller.tick().downs == (), "r0 alone has room for one of them"
    assert w.controller.reason == "instances take no new requests, so that they can part"
    w.end(2)
    assert w.fleet.groups() == ()
    failed = [event for event in w.fleet.events() if event.kind == "reshard failed"]
    assert not failed


@settings(max_examples=10, deadline=None)
@given(
    ranks=st.sampled_from([2, 3, 4]),
    sizes=st.lists(st.tuples(st.sampled_from([8, 60, 159, 160, 161, 300, 420, 700]), st.integers(0, 4)), max_size=12),
)
def test_all_end_whom_some_degree_holds(ranks: int, sizes: list[tuple[int, int]]) -> None:
    w = World(ranks)
    try:
        most = max(blocks for degree, blocks in w.capacity.items() if degree <= ranks)
        asked = set()
        for number, (blocks, pause) in enumerate(sizes):
            try:
                w.ask(blocks, str(number))
                asked.add(str(number))
                assert blocks <= most
            except CapacityError:
                assert blocks > most
            w.go_on(pause)
        w.end(len(asked))
        assert set(w.heard.ends) == asked
        assert {end.finish for end in w.heard.ends.values()} <= {"length"}
        assert w.fleet.groups() == ()
        for rank in w.ranks:
            rank.check()
    finally:
        w.close()
