"""Who waits at an instance of a group gets the blocks before newer ones elsewhere; caps move for nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from elastic.cluster.control.messages import Submit
from elastic.cluster.control.stage_questions import MeasureRoom, SetCap
from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.instance import Instance
from elastic.cluster.fleet.planning import starvation
from elastic.engines.base import Request
from support.cluster.fake_group import ALONE, LAYERS, GroupRank
from support.cluster.fake_rank import BLOCK, FakeLauncher
from support.cluster.half_group import SECTOR_BLOCKS, HalfGroup
from support.serving.generations import Collector


@pytest.fixture
def world() -> Iterator[HalfGroup]:
    made = HalfGroup()
    yield made
    made.fleet.stop(drain=False)


def instance_of(world: HalfGroup, request: str) -> tuple[Instance, GroupRank]:
    name = world.fleet.instance_of(request)
    assert name is not None
    return world.fleet._dispatcher.instances[name], next(rank for rank in world.ranks if rank.name == name)


def says(instance: Instance, rank: GroupRank, free: int, waiting: int = 0) -> None:
    """Have a rank have so many free sectors, and say so."""
    cap = rank.cap
    assert cap is not None
    rank.committed = cap - free
    load = replace(instance.load, free_blocks=free * SECTOR_BLOCKS, total_blocks=cap * SECTOR_BLOCKS, waiting=waiting)
    instance.hear(load, 0.0)


def give(world: HalfGroup, sectors: int, name: str, rank: GroupRank) -> Instance:
    """Have an instance be given a request of so many sectors, wherever there is more room."""
    dispatcher = world.fleet._dispatcher
    for instance in dispatcher.instances.values():
        instance.limit_changes += 1
    world.ask(sectors, name)
    for instance in dispatcher.instances.values():
        instance.limit_changes -= 1
    given = dispatcher.instances[rank.name]
    with dispatcher.lock:
        dispatcher._give(dispatcher.queue.popleft(), given, 0)
    return given


def starving(world: HalfGroup) -> tuple[Instance, Instance]:
    """Have a request wait at one instance that lacks four sectors for it, while the other one has five."""
    most, (hot_rank, other_rank) = min(world.caps.values()), world.ranks
    hot, other = give(world, most - 2, "long", hot_rank), give(world, most - 5, "longer", other_rank)
    hot.unheard.clear()
    other.unheard.clear()
    give(world, 6, "first", hot_rank)
    says(hot, hot_rank, 2, waiting=1)
    says(other, other_rank, 5)
    return hot, other


def test_a_new_request_leaves_what_one_lacks_that_waits_elsewhere_in_the_group(
    world: HalfGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    hot, other = starving(world)
    monkeypatch.setattr(starvation, "STARVES_S", 0.0)
    world.ask(3, "new")
    assert world.fleet.instance_of("new") is None
    assert world.fleet._groups.follow_needs() == 1
    rank = next(rank for rank in world.ranks if rank.name == hot.name)
    assert world.caps[hot.name] >= rank.committed + 6, "the one that waits can begin"
    assert world.fleet.instance_of("first") == hot.name
    says(hot, rank, 0, waiting=0)
    other.hear(replace(other.load, free_blocks=3 * SECTOR_BLOCKS), 0.0)
    with world.fleet._dispatcher.lock:
        world.fleet._dispatcher.dispatch()
    assert world.fleet.instance_of("new") == other.name


def test_a_request_that_leaves_enough_is_not_held_up(world: HalfGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    _, other = starving(world)
    monkeypatch.setattr(starvation, "STARVES_S", 0.0)
    world.ask(1, "small")
    assert world.fleet.instance_of("small") == other.name


def test_nobody_is_held_up_for_one_that_has_come_just_now(world: HalfGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    _, other = starving(world)
    monkeypatch.setattr(starvation, "STARVES_S", 1e6)
    world.ask(3, "new")
    assert world.fleet.instance_of("new") == other.name


def test_caps_stay_where_a_request_waits_although_there_are_blocks(world: HalfGroup) -> None:
    """As right after a drop: what the instance said last is of before, and so are the sequences that wait."""
    half = min(world.caps.values()) // 2
    tokens = half * SECTOR_BLOCKS * BLOCK
    world.fleet.submit(Request((1,) * 4, tokens - 4, n=3, ignore_eos=True, id="three"), world.heard)
    instance, rank = instance_of(world, "three")
    before = dict(world.caps)
    says(instance, rank, 2 * half, waiting=1)
    asked = len(rank.asked)
    assert world.fleet._groups.follow_needs() == 0
    assert not any(isinstance(question, MeasureRoom) for question in rank.asked[asked:]), "it has blocks: nobody looks"
    committed = rank.committed
    says(instance, rank, 0, waiting=1)
    rank.committed = committed
    assert world.fleet._groups.follow_needs() == 0
    assert world.caps == before
    says(instance, rank, 1, waiting=1)
    assert world.fleet._groups.follow_needs() == 1
    assert world.caps[instance.name] > before[instance.name]


class Eager(GroupRank):
    """A rank that tells at once when its cap has risen."""

    def on_set_cap(self, question: SetCap) -> Any:
        self.cap = question.sectors
        self.blocks = (ALONE if self.cap is None else self.cap) * SECTOR_BLOCKS
        self.beat()
        return self.load()


def test_what_waits_goes_to_all_instances_whose_caps_rise() -> None:
    ranks: dict[str, GroupRank] = {}
    launcher = FakeLauncher(lambda spec: Eager(spec.name, ranks))
    options: dict[str, Any] = {"beat_timeout_s": 1e6, "hang_timeout_s": 1e6, "replace": False}
    fleet = Fleet("no model", ranks=2, launch=launcher, **options)
    fleet.start()
    fleet._policies.stop()
    heard = Collector()
    for rank in ranks.values():
        rank.blocks = ALONE * SECTOR_BLOCKS
        rank.beat()
    for number, sectors in enumerate([ALONE, ALONE, 1, 1, 1, 1]):
        tokens = sectors * SECTOR_BLOCKS * BLOCK
        fleet.submit(Request((1,) * (tokens - 4), 4, ignore_eos=True, id=f"{number}"), heard)
    for rank in ranks.values():
        rank.take()
    assert fleet.status().queued == 4
    assert fleet.drop(layers={"r0": range(3, LAYERS), "r1": range(3)}).status == "applied"
    given = [sum(isinstance(message, Submit) for message in rank.inbox) for rank in ranks.values()]
    assert given == [2, 2]
    fleet.stop(drain=False)
