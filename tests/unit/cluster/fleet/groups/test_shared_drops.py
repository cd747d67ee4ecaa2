"""Instances whose ranks share layers drop some besides: they are pipelines whose stages share layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from elastic import CapacityError
from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.groups import targets
from elastic.cluster.fleet.lengths.readings import LengthReadings
from elastic.cluster.fleet.overload.readings import FleetReadings
from elastic.planning.arrangement.drop import DropPlan, GroupPlan, drop_plan
from support.cluster.fake_group import LAYERS, WEIGHT, GroupRank
from support.cluster.fake_rank import FakeLauncher

NAMES = ("r0", "r1", "r2", "r3")
LAYER_BYTES = WEIGHT * 4096
HALF = LAYERS // 2
FIRST, SECOND = frozenset(range(HALF)), frozenset(range(HALF, LAYERS))


@pytest.fixture
def ranks() -> list[GroupRank]:
    return []


@pytest.fixture
def fleet(ranks: list[GroupRank]) -> Iterator[Fleet]:
    """Of four, which share layers by pairs."""
    world: dict[str, GroupRank] = {}
    launcher: Any = FakeLauncher(lambda spec: GroupRank(spec.name, world, 4, 4))
    made = Fleet("no model", ranks=4, launch=launcher, beat_timeout_s=1e6, hang_timeout_s=1e6, replace=False)
    made.start()
    made._policies.stop()
    ranks.extend(world[name] for name in sorted(world))
    assert made.reshard(NAMES, tp=2).status == "applied"
    for rank in ranks:
        rank.committed = 2
    yield made
    made.stop(drain=False)


def test_pairs_that_share_layers_drop_as_many_as_are_needed(fleet: Fleet, ranks: list[GroupRank]) -> None:
    planned = fleet.drop(2 * LAYER_BYTES, dry_run=True)
    (group,) = planned.groups
    assert (group.members, planned.freed_bytes) == (NAMES, 2 * LAYER_BYTES)
    assert group.keeps[0] == group.keeps[1] != group.keeps[2] == group.keeps[3]
    done = fleet.drop(2 * LAYER_BYTES)
    assert (done.status, done.groups) == ("applied", planned.groups)
    assert done.freed_bytes >= planned.freed_bytes  # ranks that share a layer both have a page of it
    lacks = [frozenset(range(LAYERS)) - frozenset(keeps) for keeps in group.keeps]
    assert [len(each) for each in lacks] == [1, 1, 1, 1]
    for rank in ranks:
        own = NAMES[:2] if rank.name in NAMES[:2] else NAMES[2:]
        other = NAMES[2:] if rank.name in NAMES[:2] else NAMES[:2]
        without = lacks[NAMES.index(rank.name)]
        assert [rank.path.holders(i) for i in range(LAYERS)] == [other if i in without else own for i in range(LAYERS)]
        rank.check()


def test_all_that_they_have_twice_leaves_and_comes_back_while_they_share(fleet: Fleet, ranks: list[GroupRank]) -> None:
    for need in (2 * LAYER_BYTES, LAYERS * LAYER_BYTES - 2 * LAYER_BYTES):  # further ones, of the pipeline that it is
        for rank in ranks:
            rank.committed = 2
        assert fleet.drop(need).status == "applied"
    (group,) = fleet.groups()
    assert (group.tp, group.members) == (2, NAMES)
    assert [held.layers for held in targets.held(group.paths, group.shards)] in ([FIRST, SECOND], [SECOND, FIRST])
    with pytest.raises(CapacityError, match="no drop frees so much"):
        fleet.drop(LAYER_BYTES)
    for rank in ranks:
        rank.check()
        rank.committed = 1
    restored = fleet.restore("r2", sharing=True)
    assert (restored.status, restored.members) == ("applied", NAMES)
    assert [(group.members, group.tp) for group in fleet.groups()] == [(NAMES[:2], 2), (NAMES[2:], 2)]
    assert all(rank.path.holders(0) == rank.path.holders(LAYERS - 1) for rank in ranks)
    for rank in ranks:
        rank.check()
    assert fleet.restore(sharing=True).status == "applied"  # there is nothing to do
    assert fleet.restore().status == "applied"
    assert fleet.groups() == ()
    assert fleet.restore("r0", sharing=True).members == ("r0",)


def test_a_pair_drops_what_one_by_itself_has_too(fleet: Fleet, ranks: list[GroupRank]) -> None:
    assert fleet.reshard("r2", tp=1).status == "applied"
    for rank in ranks:
        rank.committed = 2
    done = fleet.drop(LAYERS * LAYER_BYTES, most=2)  # of three instances: a pair, and two by themselves
    assert done.status == "applied"
    for rank in ranks:
        rank.check()
        rank.committed = 1
    while fleet.groups():
        assert fleet.restore().status == "applied"
    assert all(rank.path.helpers == () for rank in ranks)


def test_policies_see_a_pair_as_one_instance(fleet: Fleet, ranks: list[GroupRank]) -> None:
    seen = FleetReadings(fleet._dispatcher)
    for rank in ranks:
        rank.blocks = 30
        rank.beat()
    snapshot = seen.read(fleet.groups(), fleet.layer_bytes())
    assert snapshot is not None
    size = ranks[0].hello.kv.group_block_bytes
    assert [(group.names, group.base_bytes) for group in snapshot.groups] == [
        (("r0",), 60 * size),
        (("r2",), 60 * size),
    ]
    plan = drop_plan(
        [[member.held for member in group.members] for group in snapshot.groups],
        snapshot.layer_bytes,
        LAYER_BYTES,
        whole=True,
    )
    assert plan is not None
    assert fleet.drop(plan=plan).status == "applied"
    for rank in ranks:
        rank.check()
        rank.blocks = 50
        rank.beat()
    after = seen.read(fleet.groups(), fleet.layer_bytes())
    assert after is not None
    (group,) = after.groups
    assert (group.names, group.base_bytes, group.capacity_bytes) == (("r0", "r2"), 120 * size, 200 * size)
    assert sorted(len(member.held.layers) for member in group.members) == [HALF, HALF]


def test_a_member_of_a_plan_stands_for_all_that_share_its_layers() -> None:
    plan = GroupPlan((0, 1), ("r0", "r2"), ((0,), (1,)), (range(1), range(1, 2)), 10)
    units = [("r0", "r1"), ("r2",)]
    told = targets.of_ranks(plan, units)
    assert (told.members, told.keeps) == (("r0", "r1", "r2"), ((0,), (0,), (1,)))
    assert told.stages == (range(1), range(1), range(1, 2))
    assert targets.of_ranks(told, units) == told
    assert DropPlan((told,), 10).freed_bytes == plan.freed_bytes


def test_the_policy_of_lengths_sees_who_computes_layers_with_whom(fleet: Fleet, ranks: list[GroupRank]) -> None:
    capacity = {name: {1: 10, 2: 30, 4: 70} for name in NAMES}

    def seen() -> dict[str, tuple[tuple[str, ...], tuple[str, ...], int]]:
        snapshot = LengthReadings(fleet._dispatcher).read(fleet.groups(), capacity)
        assert snapshot is not None
        return {one.name: (one.ranks, one.partners, one.room) for one in snapshot.instances}

    assert seen() == {"r0": (NAMES[:2], (), 30), "r2": (NAMES[2:], (), 30)}
    fleet.drop(2 * LAYER_BYTES)
    for rank in ranks:
        rank.blocks = 25
        rank.beat()
    assert seen() == {"r0": (NAMES[:2], NAMES[2:], 50), "r2": (NAMES[2:], NAMES[:2], 50)}
