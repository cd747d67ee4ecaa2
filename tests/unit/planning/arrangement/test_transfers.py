from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import ConfigError
from elastic.planning.arrangement.arrangement import Arrangement, assign
from elastic.planning.arrangement.transfers import LayerKV, Transfer, kv_heads, moves, owner, slices
from support.planning.random_arrangements import arrangements, assignments, held

KV = [LayerKV(4, 10)] * 4


def test_two_instances_that_become_stages_move_the_other_sides_requests() -> None:
    both = Arrangement.merged([Arrangement.alone(4, "a"), Arrangement.alone(4, "b")])
    after = Arrangement(((("a",),),) * 2 + ((("b",),),) * 2, "a", 2)
    homes = {"x": "a", "y": "b", "z": "b"}
    found = moves(both, after, assign(both, homes), assign(after, homes), KV, {"x": 3, "y": 5, "z": 0})
    assert set(found) == {
        Transfer(("x",), range(2, 4), range(4), "a", "b", 2 * 4 * 3 * 10),
        Transfer(("y",), range(2), range(4), "b", "a", 2 * 4 * 5 * 10),
    }


def test_data_parallel_to_shards_moves_half_of_the_heads_each_way() -> None:
    both = Arrangement.merged([Arrangement.alone(4, "a"), Arrangement.alone(4, "b")])
    after, homes = Arrangement.alone(4, "a", "b"), {"x": "a", "y": "b"}
    at, then = assign(both, homes), assign(after, homes)
    found = moves(both, after, at, then, KV, {"x": 1, "y": 1})
    assert {(t.requests, t.heads, t.frm, t.to) for t in found} == {
        (("x",), range(2, 4), "a", "b"),
        (("y",), range(2), "b", "a"),
    }
    assert owner(after, then, KV, "x", 0, 3) == "b"
    back = moves(after, both, then, at, KV, {"x": 1, "y": 1})
    assert sum(t.nbytes for t in back) == sum(t.nbytes for t in found)


def test_more_parts_than_heads_repeat_them() -> None:
    assert kv_heads(("a", "b", "c", "d"), 2) == (range(1), range(1), range(1, 2), range(1, 2))
    assert kv_heads(("a", "b"), 0) == (range(0), range(0))
    with pytest.raises(ConfigError, match="3 KV heads"):
        kv_heads(("a", "b"), 3)


def test_a_window_bounds_what_moves() -> None:
    before, after = Arrangement.alone(1, "a"), Arrangement.alone(1, "b")
    (one,) = moves(before, after, {"x": (0,)}, {"x": (0,)}, [LayerKV(1, 2, window=8)], {"x": 100})
    assert one.nbytes == 16


def test_requests_that_come_or_end_move_nothing() -> None:
    one, other = Arrangement.alone(2, "a"), Arrangement.alone(2, "b")
    assert moves(one, other, {"old": (0, 0)}, {"new": (0, 0)}, KV[:2], {"old": 3, "new": 3}) == ()


@st.composite
def changes(draw: st.DrawFn) -> tuple[Arrangement, Arrangement, dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    before, after = draw(arrangements(4)), draw(arrangements(4))
    requests = [f"r{i}" for i in range(draw(st.integers(0, 4)))]
    return before, after, draw(assignments(before, requests)), draw(assignments(after, requests))


@given(changes(), st.lists(st.sampled_from([0, 1, 2, 4, 8]), min_size=4, max_size=4))
def test_moves_are_the_least_that_brings_every_slice_where_it_is_needed(change: tuple, heads: list[int]) -> None:  # type: ignore[type-arg]
    before, after, at, then = change
    kv = [LayerKV(count, 8) for count in heads]
    tokens = {request: 3 + i for i, request in enumerate(at)}
    has = {
        (rank, request, layer, head)
        for request in at
        for layer in range(4)
        for rank, held_heads in held(before, at[request], layer, kv[layer]).items()
        for head in held_heads
    }
    needs = {
        (rank, request, layer, head)
        for request in then
        for layer in range(4)
        for rank, held_heads in held(after, then[request], layer, kv[layer]).items()
        for head in held_heads
    }
    moved = [
        (t.frm, t.to, request, layer, head)
        for t in moves(before, after, at, then, kv, tokens)
        for request in t.requests
        for layer in t.layers
        for head in t.heads
    ]
    assert all((frm, *rest) in has for frm, _, *rest in moved)
    arrived = [(to, *rest) for _, to, *rest in moved]
    assert sorted(arrived) == sorted(needs - has)  # each once, and nothing besides
    nbytes = sum(8 * tokens[str(request)] for _, _, request, _, _ in moved)
    assert nbytes == sum(t.nbytes for t in moves(before, after, at, then, kv, tokens))
    assert {(rank, *rest) for rank, rest in slices(after, then, kv)} == needs


@given(changes())
def test_nothing_moves_where_nothing_changes(change: tuple) -> None:  # type: ignore[type-arg]
    before, _, at, _ = change
    assert moves(before, before, at, at, [LayerKV(4, 1)] * 4, dict.fromkeys(at, 7)) == ()
