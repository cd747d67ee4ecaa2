"""Algorithm 2: migrate, evict, reduce; the first remedy that suffices is the last (CoCoServe, section 4.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.planning.placement import PlaceCapacity, Placement, ResourceDemand
from elastic.planning.scale_down import Deficit, ScaleDownResult, joined, scale_down
from elastic.types import Evict, Migrate, MigrateKV, Release
from support.planning.printed import HeterogeneousCost
from support.planning.random_placements import random_case

PARTS = {"mlp": ResourceDemand(60, 0.06), "self_attn": ResourceDemand(30, 0.03)}
NEED = ResourceDemand(100, 0.1, kv_bytes=50, parts=PARTS)


Links = Mapping[str, Mapping[str, float]]


def place(name: str, free: int, idle: float = 1.0, **fields: Any) -> PlaceCapacity:
    return PlaceCapacity(name, 1000, free, 1.0, idle, margin=0.0, **fields)


def of(text: str) -> Placement:
    return Placement(tuple(map(tuple, text.split())))


def down(
    layers: str, places: list[PlaceCapacity], shortage: Deficit, links: Links | None = None, **options: Any
) -> ScaleDownResult:
    placement = of(layers)
    model = HeterogeneousCost(64, 8, 1, {p.name: p for p in places}, bandwidths=links or {})
    return scale_down(placement, [NEED] * len(placement.layers), places, model, shortage, **options)


A, B, C = place("a", 0, 0.0), place("b", 1000), place("c", 1000, 0.9)


@pytest.mark.parametrize(
    ("layers", "places", "shortage", "actions", "remedy", "over"),
    [
        # nothing is short
        ("a a", [A, B], Deficit("a"), (), "none", True),
        # a whole layer with its KV, the last one first
        ("a a a", [A, B], Deficit("a", 120), (Migrate((2,), "b"), MigrateKV((2,), "b")), "migration", True),
        ("a a a", [A, B], Deficit("a", 200), (Migrate((1, 2), "b"), MigrateKV((1, 2), "b")), "migration", True),
        # as speed is short
        (
            "a a a",
            [A, B],
            Deficit("a", compute=0.15),
            (Migrate((1, 2), "b"), MigrateKV((1, 2), "b")),
            "migration",
            True,
        ),
        # where the next layer is, though another place is emptier
        ("a a c", [A, B, C], Deficit("a", 100), (Migrate((1,), "c"), MigrateKV((1,), "c")), "migration", True),
        # a place with memory and no compute takes the KV cache
        ("a a a", [A, place("b", 1000, 0.05)], Deficit("a", 90), (MigrateKV((1, 2), "b"),), "migration", True),
        # a place with compute and little memory takes a module
        ("a a", [A, place("b", 70)], Deficit("a", compute=0.05), (Migrate((1,), "b", ("mlp",)),), "migration", True),
        (
            "a",
            [A, place("b", 40)],
            Deficit("a", compute=0.02),
            (Migrate((0,), "b", ("self_attn",)),),
            "migration",
            True,
        ),
        # a place that has only replicas gives them up
        ("b b ba", [A, B], Deficit("a", 100), (Evict((2,), "a"),), "eviction", True),
        # nothing else helps: layers are offloaded, and the batch shrinks
        ("a a", [A], Deficit("a", 130), (Release((1,)),), "reduction", True),
    ],
)
def test_the_first_remedy_that_suffices(
    layers: str, places: list[PlaceCapacity], shortage: Deficit, actions: Any, remedy: str, over: bool
) -> None:
    found = down(layers, places, shortage, rows=8)
    assert (found.actions, found.remedy, found.left.over) == (actions, remedy, over)


def test_remedies_add_up_in_their_order() -> None:
    places = [A, place("b", 150)]
    found = down("a a ba ba", places, Deficit("a", 330))
    assert found.actions == (Migrate((1,), "b"), MigrateKV((1,), "b"), Release((0,)))
    assert found.remedy == "reduction"  # b is full: it cannot take the rows of replicas that would go
    found = down("a a ca ca", [*places, place("c", 130)], Deficit("a", 400), rows=8)
    assert found.actions == (
        Migrate((1,), "b"),
        MigrateKV((1,), "b"),
        MigrateKV((0,), "c"),
        Evict((2, 3), "a"),
    )
    assert (found.placement, found.remedy) == (of("a b c c"), "eviction")


def test_the_least_useful_replica_goes_first() -> None:
    """One of the middle of a run would make two more transitions."""
    links = {"a": {"b": 0.05}, "b": {"a": 0.05}}
    found = down("ba ba ba", [place("a", 0, 0.0), place("b", 1000)], Deficit("a", 100), links)
    assert found.actions == (Evict((0,), "a"),) or found.actions == (Evict((2,), "a"),)


def test_the_batch_shrinks_by_delta_until_it_suffices() -> None:
    found = down("a a", [A], Deficit("a", compute=0.1), rows=16, delta=5)
    assert (found.rows, found.actions) == (6, ())  # 10 of 16 rows have more than half of the load
    assert down("a a", [A], Deficit("a", compute=0.01), rows=16).rows == 11
    helpless = down("a a", [A], Deficit("a", compute=9.0), rows=16)
    assert (helpless.rows, helpless.left.over) == (1, False)
    assert down("a", [A], Deficit("a", 10**6), rows=1, offload=False).actions == ()


def test_a_shortage_can_be_left_to_some_remedies() -> None:
    found = down("ab ba", [A, B], Deficit("a", 100), remedies=("eviction",))
    assert found.actions == (Evict((1,), "a"),)


def test_actions_of_one_kind_and_target_are_one() -> None:
    actions = [Migrate((2,), "b"), MigrateKV((2,), "b"), Migrate((1,), "b"), Migrate((0,), "c")]
    assert joined(actions) == (Migrate((1, 2), "b"), MigrateKV((2,), "b"), Migrate((0,), "c"))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.integers(1, 900), st.floats(0, 0.5), st.integers(1, 30))
def test_survivors_keep_their_margins_and_later_remedies_come_last(
    seed: int, nbytes: int, compute: float, rows: int
) -> None:
    case = random_case(seed, printed=True, layers=8)
    shortage = Deficit("a", nbytes, compute)
    args = case.placement, case.needs, case.places, case.model, shortage
    found = scale_down(*args, rows=rows)
    assert found == scale_down(*args, rows=rows)
    rooms = {one.name: one for one in case.places}
    for action in found.actions:
        if isinstance(action, Migrate) and not action.parts:
            for layer in action.layers:
                rooms[action.place] = rooms[action.place].having(ResourceDemand(case.needs[layer].nbytes))
    assert all(
        room.free_bytes >= min(room.margin * 1000, case.places["abc".index(n)].free_bytes) for n, room in rooms.items()
    )
    order = [(Migrate, MigrateKV), (Evict,), (Release,)]
    stages = [next(i for i, kinds in enumerate(order) if isinstance(a, kinds)) for a in found.actions]
    assert stages == sorted(stages)
    if found.remedy in ("migration", "eviction"):
        assert found.rows == rows
    without_last = [a for a in found.actions if isinstance(a, Migrate) and not a.parts]
    if found.remedy == "migration" and found.left.over and without_last:
        moved = [layer for a in without_last for layer in a.layers]
        freed = sum(case.needs[layer].nbytes for layer in moved)
        spent = sum(case.needs[layer].compute for layer in moved)
        last = case.needs[min(moved)]
        assert freed - last.nbytes < nbytes or spent - last.compute < compute  # not one layer more than needed
