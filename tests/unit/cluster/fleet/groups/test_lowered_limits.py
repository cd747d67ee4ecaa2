"""The limit of a rank in a group is lowered: caps fall to what fits, and no stage keeps less than homes may map."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from elastic import CapacityError
from elastic.cluster.control.stage_questions import Allot
from support.cluster.fake_group import GroupRank
from support.cluster.half_group import SECTOR_BLOCKS, HalfGroup


@pytest.fixture
def world() -> Iterator[HalfGroup]:
    made = HalfGroup()
    yield made
    made.fleet.stop(drain=False)


def lower(world: HalfGroup, rank: GroupRank, pages: int) -> None:
    """Have a rank have so few pages for keys and values, and say that fewer blocks are left for its own requests."""
    rank.budget = rank.weights() + pages
    instance = world.fleet._dispatcher.instances[rank.name]
    instance.hear(replace(instance.load, total_blocks=SECTOR_BLOCKS, free_blocks=SECTOR_BLOCKS), 0.0)


def allotted(world: HalfGroup) -> dict[str, int]:
    return {home: guest.sectors for rank in world.ranks for home, guest in rank.guests.items()}


def test_caps_fall_though_nobody_waits_and_then_stay(world: HalfGroup) -> None:
    assert world.fleet._groups.follow_needs() == 0
    before = sum(world.caps.values())
    lower(world, world.ranks[0], 60)
    assert world.fleet._groups.follow_needs() == 1
    assert 0 < sum(world.caps.values()) < before
    assert allotted(world) == world.caps
    for rank in world.ranks:
        rank.check()
    world.tell()
    assert world.fleet._groups.follow_needs() == 0


def test_what_lives_keeps_what_it_has(world: HalfGroup) -> None:
    hot, other = world.ranks
    hot.committed = 30
    lower(world, hot, 120)
    assert world.fleet._groups.follow_needs() == 1
    assert world.caps[hot.name] >= 30
    lower(world, hot, 30)
    assert world.fleet._groups.follow_needs() == 1, "the other one gives up what it has not"
    assert world.caps == {hot.name: 30, other.name: 0}


def test_a_stage_that_cannot_have_its_room_back_leaves_the_cap_low(world: HalfGroup) -> None:
    """A cap that is above what a stage keeps room for would have steps fail there."""
    first, second = world.ranks
    lower(world, first, 60)
    before = world.caps

    def refuse(question: object) -> Exception | None:
        """Say at one stage that more is mapped, and find no room again at the other."""
        if isinstance(question, Allot) and question.sectors < before[question.home]:
            raised[:] = [True]
            return CapacityError("mapped", requested_bytes=1, free_bytes=0, total_bytes=0)
        return None

    raised: list[bool] = []
    second.fails = refuse
    first.fails = lambda question: (
        CapacityError("no room", requested_bytes=1, free_bytes=0, total_bytes=0)
        if raised and isinstance(question, Allot) and question.sectors == before[question.home]
        else None
    )
    assert world.fleet._groups.follow_needs() == 0
    assert raised
    for home, cap in world.caps.items():
        stage = next(rank for rank in world.ranks if home in rank.guests)
        assert cap <= stage.guests[home].sectors
    assert min(world.caps.values()) < min(before.values())
