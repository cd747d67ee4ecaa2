"""What steps take is kept free at every degree: told capacities and caps leave room for it. (AMOEBA, table 1)"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.groups.caps.reach import blocks_by_degree
from elastic.planning.arrangement.step_pages import StepPages
from support.cluster.fake_group import ALONE, LAYERS, SECTOR, GroupRank, kv_of
from support.cluster.fake_rank import FakeLauncher

SHARDS = 4
SECTOR_BLOCKS = SECTOR * 4096 // kv_of(SHARDS).block_bytes
WHOLE = LAYERS * SHARDS * SECTOR
"""Pages of a sector with all of its parts."""


def rank_with(prompt: float, decode: float, world: dict[str, GroupRank], name: str = "r0") -> GroupRank:
    """A rank whose place is charged with what steps take over all sectors that it has by itself."""
    rank = GroupRank(name, world, SHARDS, SHARDS)
    each = StepPages(prompt, decode).of(1.0)
    rank.step_memory = StepPages(prompt, decode, ALONE * each)
    return rank


def told(rank: GroupRank) -> dict[int, int]:
    return blocks_by_degree(rank.on_measure_room(None), kv_of(SHARDS), (1, 2, 4))  # type: ignore[arg-type]


@pytest.mark.parametrize(("prompt", "decode"), [(3.0, 0.0), (0.0, 12.0), (2.5, 12.0)])
def test_a_degree_holds_less_by_what_its_longest_request_takes_beside_the_cache(prompt: float, decode: float) -> None:
    plain, rank = GroupRank("r0", {}, SHARDS, SHARDS), rank_with(prompt, decode, {})
    assert told(plain)[1] == told(rank)[1] == ALONE * SECTOR_BLOCKS, "its place is charged with what that takes"
    for degree in (2, 4):
        part = {layer * SHARDS + part for layer in range(LAYERS) for part in range(SHARDS // degree)}
        pages = rank.budget + rank.step_memory.charged - rank.weights(part)
        sectors = pages // (WHOLE // degree + rank.step_memory.of(1 / degree))
        assert told(rank)[degree] == sectors * SECTOR_BLOCKS
        assert told(rank)[degree] < pages // (WHOLE // degree) * SECTOR_BLOCKS


def test_nothing_is_kept_twice_or_for_nobody() -> None:
    steps = StepPages(2.5, 12.0, charged=100)
    assert [steps.of(share) for share in (0.0, 0.1, 0.5, 1.0)] == [0, 3, 6, 12]
    assert (steps.kept(3), steps.kept(50)) == (36, 100)
    assert StepPages().kept(50) == StepPages().of(1.0) == 0


@given(prompt=st.floats(0, 20), decode=st.floats(0, 40), parts=st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_pages_that_come_part_by_part_are_those_of_all_parts(prompt: float, decode: float, parts: list[int]) -> None:
    room = rank_with(prompt, decode, {}).on_measure_room(None)  # type: ignore[arg-type]
    had = total = 0
    for more in parts:
        total += room.step_pages(more, beside=had)
        had += more
    assert total == room.step_pages(had)


@pytest.fixture
def fleet() -> Iterator[tuple[Fleet, list[GroupRank]]]:
    world: dict[str, GroupRank] = {}
    launcher: Any = FakeLauncher(lambda spec: rank_with(2.5, 12.0, world, spec.name))
    fleet = Fleet("no model", ranks=4, launch=launcher, replace=False, beat_timeout_s=1e6, hang_timeout_s=1e6)
    fleet.start()
    fleet._policies.stop()
    yield fleet, [world[name] for name in sorted(world)]
    fleet.stop(drain=False)


@pytest.mark.parametrize("tp", [2, 4])
def test_caps_leave_free_what_steps_take(fleet: tuple[Fleet, list[GroupRank]], tp: int) -> None:
    one, ranks = fleet
    names = [rank.name for rank in ranks]
    for rank in ranks:
        rank.committed = 1
    known = one.capacity((1, 2, 4))
    assert one.reshard(names, tp=tp).status == "applied"
    for group in one.groups():
        members = [rank for rank in ranks if rank.name in group.members]
        largest = max(rank.cap or 0 for rank in members)
        sectors = sum(rank.cap or 0 for rank in members)
        for rank in members:
            each = rank.step_memory.of(1 / tp)
            used = sectors * WHOLE // tp + max(0, largest * each - rank.step_memory.charged)
            assert rank.weights() + used <= rank.budget
            reached = one._dispatcher.instances[rank.name].group_blocks
            assert reached == known[rank.name][tp], "what was told before is what it can have"
    assert one.reshard("r0", tp=1).status == "applied"
    for rank in ranks:
        rank.check()
