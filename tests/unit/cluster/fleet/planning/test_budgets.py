"""What ranks tell of themselves becomes what plans of drops must fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.cluster.control.stage_questions import Room
from elastic.cluster.fleet.planning.budgets import COMPARED, Budgets
from elastic.controller.fleet_snapshot import FleetSnapshot, GroupReading, MemberReading
from elastic.engines.core.kv_state import KVFormat
from elastic.engines.pipeline.path import LayerPath
from elastic.planning.arrangement.drop import drop_plan
from elastic.planning.arrangement.stages import Held
from elastic.planning.pipeline.chunk_cost import ChunkCost, ModelCost
from elastic.planning.sharding.shard_pages import ShardPages

LAYERS, PAGE, WEIGHT = 4, 4096, 8
ALL = frozenset(range(LAYERS))
KV = KVFormat(4, "head_centric", "float32", 2, 8, ((tuple(range(LAYERS)), None),))


def room(path: LayerPath, pages: int = 100, committed: int = 0, **other: Any) -> Room:
    shards = path.shards
    per_part = WEIGHT // shards
    parts = tuple((range(part * per_part, (part + 1) * per_part),) for part in range(shards))
    weights, resident = (ShardPages((), parts),) * LAYERS, frozenset(range(LAYERS * shards))
    sizes, held = (1,) * LAYERS, (0,) * LAYERS
    return Room(path, pages, PAGE, sizes, 1000, committed, held, weights, **{"resident": resident, **other})


def alone(name: str, pages: int = 100, committed: int = 0, **other: Any) -> Room:
    return room(LayerPath.alone(name, LAYERS), pages, committed, **other)


def budgets(*rooms: Room, kv: KVFormat = KV, seconds: Mapping[str, float] | None = None) -> Budgets:
    costs = {
        name: ModelCost(
            ChunkCost(0.0, 0.0, each / COMPARED.tokens, 0.0, 0.0), ChunkCost(0.0, 0.0, 0.0, 0.0, 0.0), LAYERS
        )
        for name, each in (seconds or {}).items()
    }
    instances: list[Any] = [
        SimpleNamespace(name=r.path.home, kv_format=kv, hello=SimpleNamespace(cost=costs.get(r.path.home)))
        for r in rooms
    ]
    return Budgets({each.path.home: each for each in rooms}, instances)


def test_memory_is_a_limit_where_ranks_have_unlike_budgets() -> None:
    small, large = alone("a", 40, 3), alone("b", 100, 9)
    told = budgets(small, large)
    a, b = (told.fitted(Held(name, ALL)) for name in "ab")
    assert (a.room_bytes, b.room_bytes) == ((40 + LAYERS * WEIGHT) * PAGE, (100 + LAYERS * WEIGHT) * PAGE)
    assert (a.kv_bytes, b.kv_bytes) == ((3 * PAGE,) * LAYERS, (9 * PAGE,) * LAYERS)
    like = budgets(alone("a", 40, 3), alone("b", 40 + WEIGHT, 9, resident=ALL - {0}))  # b has dropped a layer
    assert [like.fitted(Held(name, ALL)).room_bytes for name in "ab"] == [None, None]
    assert like.fitted(Held("c", ALL)) == Held("c", ALL), "it came since"


def test_the_pages_of_a_layer_are_those_of_all_parts_that_a_ranks_shards_of_it_need() -> None:
    """Each layer has four shards and two parts of the cache; `b` computes the second half of the last two layers."""
    path = LayerPath("a", ("a",) * 8 + ("a", "a", "b", "b") * 2, shards=4)
    sectors, committed = (1, 2, 3, 4, 5, 6, 7, 8), 3
    kv = KVFormat(4, "head_centric", "float32", 2, 8, ((tuple(range(8)), None),))
    shared = replace(room(path, committed=committed, resident=frozenset(path.shards_of("a"))), sector_pages=sectors)
    none = replace(room(LayerPath.alone("b", LAYERS, 4)), sector_pages=sectors)
    told = budgets(shared, none, kv=kv)
    pages = {rank: [nbytes // PAGE for nbytes in told._kv[rank]] for rank in "ab"}
    assert pages == {
        "a": [committed * (1 + 2), committed * (3 + 4), committed * 5, committed * 7],
        "b": [0, 0, committed * 6, committed * 8],
    }


def test_layers_in_a_variant_count_as_what_they_are_when_they_return() -> None:
    packed = alone("a", 40 + WEIGHT - 2, in_variant={1: 2})  # its cache has what the variant has freed
    assert budgets(packed, alone("b", 40)).fitted(Held("a", ALL)).room_bytes is None


def test_keys_and_values_are_where_they_are_computed() -> None:
    ranks = ("a", "a", "b", "b")
    both = budgets(room(LayerPath("a", ranks), 100, 3), room(LayerPath("b", ranks), 100, 9))
    assert both.fitted(Held("a", frozenset((0, 1)))).kv_bytes == (12 * PAGE, 12 * PAGE, 0, 0)
    assert both.fitted(Held("b", frozenset((2, 3)))).kv_bytes == (0, 0, 12 * PAGE, 12 * PAGE)


def test_of_who_has_lost_a_rank_nothing_is_said() -> None:
    told = budgets(room(LayerPath("a", ("a", "a", "b", "b")), 100, 3), alone("c", 50))
    assert told.fitted(Held("a", ALL)) == Held("a", ALL)
    assert told.fitted(Held("c", ALL)).room_bytes == (50 + LAYERS * WEIGHT) * PAGE


def test_of_who_computes_with_one_that_has_lost_a_rank_nothing_is_said() -> None:
    a, b = LayerPath("a", ("a", "a", "b", "b")), LayerPath("b", ("lost", "a", "b", "b"))
    told = budgets(room(a, 100, 3), room(b, 100, 3), alone("c", 50))
    assert [told.fitted(Held(name, ALL)) for name in "ab"] == [Held(name, ALL) for name in "ab"]
    assert told.fitted(Held("c", ALL)).room_bytes == (50 + LAYERS * WEIGHT) * PAGE


def test_ranks_that_share_layers_have_their_memory_together() -> None:
    shared = LayerPath("a", ("a", "b") * LAYERS, shards=2), LayerPath("b", ("a", "b") * LAYERS, shards=2)
    halves = [frozenset(range(part, 2 * LAYERS, 2)) for part in range(2)]
    told = budgets(*(room(path, 40, 3, resident=half) for path, half in zip(shared, halves, strict=True)), alone("c"))
    pair = told.fitted(Held("a", ALL))
    assert pair.room_bytes == 2 * (40 + LAYERS * WEIGHT // 2) * PAGE
    assert told.fitted(Held("b", ALL)) == Held("b", ALL), "it is known by the name of the first"


def test_sectors_of_several_groups_are_no_more_than_the_largest_group_needs() -> None:
    windows = KVFormat(4, "head_centric", "float32", 2, 8, (((0, 1, 2), None), ((3,), 8)))
    told = budgets(alone("a", 40, 4), alone("b"), kv=windows).fitted(Held("a", ALL))
    assert told.kv_bytes == (3 * PAGE,) * LAYERS  # 4 sectors of 3 pages, over 4 layers


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [({}, [1.0, 1.0]), ({"a": 0.1}, [1.0, 1.0]), ({"a": 0.1, "b": 0.14}, [1.0, 1.0]), ({"a": 0.2, "b": 0.1}, [2, 1])],
)
def test_slower_ranks_are_known_where_all_have_measured_it(seconds: dict[str, float], expected: list[float]) -> None:
    told = budgets(alone("a"), alone("b"), seconds=seconds)
    assert [told.fitted(Held(name, ALL)).slowness for name in "ab"] == expected


def test_a_slower_rank_has_fewer_layers_as_far_as_the_other_has_room() -> None:
    """Else what was dropped for more keys and values would leave room for fewer."""
    seconds, need = {"a": 0.5, "b": 0.1}, 1

    def cut(committed: int) -> tuple[range, ...]:
        told = budgets(alone("a", 60, committed), alone("b", 60, committed), seconds=seconds)
        plan = drop_plan([(told.fitted(Held(name, ALL)),) for name in "ab"], (WEIGHT * PAGE,) * 4, need)
        assert plan is not None
        return plan.groups[0].stages

    assert cut(committed=5) == (range(1), range(1, 4))
    assert cut(committed=15) == (range(2), range(2, 4))


def test_all_members_of_a_snapshot_are_fitted() -> None:
    groups = tuple(GroupReading((MemberReading(Held(name, ALL), 10),), 10, 0) for name in "ab")
    snapshot = FleetSnapshot(0.0, groups, (WEIGHT * PAGE,) * LAYERS)
    told = budgets(alone("a", 40, 3), alone("b"))
    after = told.of_all(snapshot)
    assert [group.members[0].held for group in after.groups] == [told.fitted(Held(name, ALL)) for name in "ab"]
