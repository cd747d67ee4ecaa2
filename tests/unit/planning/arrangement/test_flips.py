from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import CapacityError
from elastic.planning.arrangement.arrangement import Arrangement, assign
from elastic.planning.arrangement.flips import FlipOrder, LayerChange, LayerWeights, Moving, flip_order, layer_changes
from elastic.planning.arrangement.transfers import LayerKV
from support.planning.random_arrangements import ledger

LAYERS = 6
KV = [LayerKV(4, 1)] * LAYERS


def lockstep(ranks: str) -> Arrangement:
    return Arrangement.merged([Arrangement.alone(LAYERS, rank) for rank in ranks])


def staged(*runs: tuple[str, int]) -> Arrangement:
    return Arrangement(tuple(((rank,),) for rank, count in runs for _ in range(count)), runs[0][0], 9)


def changed(
    before: Arrangement, after: Arrangement, tokens: Mapping[str, int], weights: int
) -> tuple[tuple[LayerChange, ...], dict[str, int], dict[str, int]]:
    """The changes, and the ledgers before and after; requests are named after their homes."""
    homes = {request: request[0] for request in tokens}
    at, then = assign(before, homes), assign(after, homes)
    sizes = [LayerWeights(weights)] * LAYERS
    changes = layer_changes(before, after, at, then, KV, tokens, sizes)
    used = [ledger(a, b, KV, tokens, [weights] * LAYERS) for a, b in ((before, at), (after, then))]
    return changes, used[0], used[1]


def replay(changes: Sequence[LayerChange], order: FlipOrder, free: Mapping[str, int]) -> dict[str, int]:
    """Do the flips one by one on a ledger; nothing is below zero, except by what is staged, and that comes back."""
    left, by_layer = Counter(free), {change.layer: change for change in changes}
    least = dict(free)
    done: dict[int, set[str]] = {}
    for flip in order.flips:
        change = by_layer[flip.layer]
        if flip.layer not in done:
            left.subtract(change.loads)
        before = done.setdefault(flip.layer, set())
        gives = Counter(change.unloads if flip.ends else {})
        for moving in change.moving:
            for request, each in zip(moving.requests, moving.bytes_per_head, strict=True):
                if request in flip.requests:
                    left.subtract({rank: heads * each for rank, heads in moving.arriving.items()})
                    gives.update({rank: heads * each for rank, heads in moving.leaving.items()})
        least = {rank: min(nbytes, left[rank]) for rank, nbytes in least.items()}
        assert not set(flip.requests) & before, "a request flips twice"
        before |= set(flip.requests)
        left.update(gives)
    for change in changes:
        assert done[change.layer] == {request for moving in change.moving for request in moving.requests}
        assert sum(flip.ends for flip in order.flips if flip.layer == change.layer) == 1
    assert least == order.least_free
    assert min(least.values(), default=0) >= -order.staged_bytes
    assert min(left.values()) >= 0
    return dict(left)


TOKENS = st.lists(st.integers(1, 30), min_size=0, max_size=6)


@given(TOKENS, TOKENS, st.integers(0, 200), st.integers(1, LAYERS - 1))
def test_two_full_ranks_become_stages_with_room_for_one_request_of_one_layer(
    of_a: list[int], of_b: list[int], weights: int, cut: int
) -> None:
    tokens = {**{f"a{i}": n for i, n in enumerate(of_a)}, **{f"b{i}": n for i, n in enumerate(of_b)}}
    changes, used, then = changed(lockstep("ab"), staged(("a", cut), ("b", LAYERS - cut)), tokens, weights)
    largest = 4 * max([*of_a, *of_b, 0])
    free = dict.fromkeys("ab", largest)  # the reserve alone: all else is full
    if any(used[rank] + free[rank] < then[rank] for rank in "ab"):
        with pytest.raises(CapacityError, match="no room for its layers"):
            flip_order(changes, free)
        return
    if any(used[rank] < then[rank] for rank in "ab"):  # the reserve is used up in the end: it may not be enough
        return
    order = flip_order(changes, free)
    assert order.staged_bytes == 0
    assert min(order.least_free.values()) >= 0
    left = replay(changes, order, free)
    assert {rank: used[rank] + free[rank] - left[rank] for rank in "ab"} == {rank: then[rank] for rank in "ab"}


@given(TOKENS, TOKENS, st.integers(0, 100))
def test_a_restore_finds_an_order_when_there_is_room_in_the_end(of_a: list[int], of_b: list[int], weights: int) -> None:
    tokens = {**{f"a{i}": n for i, n in enumerate(of_a)}, **{f"b{i}": n for i, n in enumerate(of_b)}}
    changes, used, then = changed(staged(("a", 3), ("b", 3)), lockstep("ab"), tokens, weights)
    free = {rank: max(0, then[rank] - used[rank]) + weights + 4 * sum([*of_a, *of_b]) for rank in "ab"}
    order = flip_order(changes, free)
    assert order.staged_bytes == 0
    replay(changes, order, free)


def test_weights_that_come_are_counted_once_when_a_layer_flips_request_by_request() -> None:
    tokens = {f"{rank}{i}": 10 for rank in "ab" for i in range(4)}
    changes, used, then = changed(staged(("a", 3), ("b", 3)), lockstep("ab"), tokens, 200)
    free = {rank: then[rank] - used[rank] + 40 for rank in "ab"}
    order = flip_order(changes, free)
    parts = [flip for flip in order.flips if not flip.ends]
    assert parts
    assert order.staged_bytes == 0
    assert replay(changes, order, free) == {"a": 40, "b": 40}


def test_the_flip_after_which_its_receivers_have_the_most_room_is_next() -> None:
    def change(layer: int, rank: str, arriving: int) -> LayerChange:
        return LayerChange(layer, {}, (Moving(("r",), (arriving,), {rank: 1}, {}),), {rank: arriving})

    order = flip_order([change(0, "a", 9), change(1, "a", 2), change(2, "b", 4)], {"a": 10, "b": 20})
    assert [flip.layer for flip in order.flips] == [2, 1, 0]


@given(st.lists(st.lists(st.integers(1, 20), max_size=3), min_size=3, max_size=4), st.integers(0, 100), st.data())
def test_more_ranks_stage_one_layer_at_the_most(of: list[list[int]], weights: int, data: st.DataObject) -> None:
    ranks = "abcd"[: len(of)]
    tokens = {f"{rank}{i}": n for rank, lengths in zip(ranks, of, strict=True) for i, n in enumerate(lengths)}
    counts = [1 + LAYERS // len(ranks) - 1] * (len(ranks) - 1)
    after = staged(*zip(ranks, [*counts, LAYERS - sum(counts)], strict=True))
    changes, used, then = changed(lockstep(ranks), after, tokens, weights)
    largest = 4 * max(tokens.values(), default=0)
    free = {rank: largest + max(0, then[rank] - used[rank]) for rank in ranks}
    order = flip_order(changes, free)
    most = max((sum(sum(m.bytes_per_head) * 4 for m in change.moving) for change in changes), default=0)
    assert order.staged_bytes <= most
    replay(changes, order, free)


@given(TOKENS, TOKENS)
def test_a_reshard_up_and_down_keeps_the_ledgers(of_a: list[int], of_b: list[int]) -> None:
    tokens = {**{f"a{i}": n for i, n in enumerate(of_a)}, **{f"b{i}": n for i, n in enumerate(of_b)}}
    homes = {request: request[0] for request in tokens}
    both, cut = lockstep("ab"), Arrangement.alone(LAYERS, "a", "b")
    at, then, sizes = assign(both, homes), assign(cut, homes), [LayerWeights(20, 60)] * LAYERS
    room = {rank: 12 * sum(tokens.values()) + 30 for rank in "ab"}
    up = layer_changes(both, cut, at, then, KV, tokens, sizes)
    assert all(change.unloads == {"a": 30, "b": 30} and not change.loads for change in up)
    after = replay(up, flip_order(up, room), room)
    total = sum(room.values()) + 2 * 30 * LAYERS
    assert sum(after.values()) == total
    down = layer_changes(cut, both, then, at, KV, tokens, sizes)
    assert all(change.loads == {"a": 30, "b": 30} and not change.unloads for change in down)
    assert replay(down, flip_order(down, after), after) == room


def test_layers_alternate_and_only_the_first_needs_room_that_was_kept() -> None:
    tokens = {"a": 10, "b": 10}
    changes, _, _ = changed(lockstep("ab"), staged(("a", 3), ("b", 3)), tokens, 100)
    order = flip_order(changes, {"a": 40, "b": 0})
    sides = [flip.layer < 3 for flip in order.flips]
    assert sides[:2] == [True, False]  # into a, where the reserve is; what that frees at b pays for the next
    assert sorted(flip.layer for flip in order.flips) == list(range(LAYERS))
    assert order.least_free == {"a": 0, "b": 0}
    assert all(flip.ends for flip in order.flips)


def test_with_room_for_one_request_the_first_layers_flip_request_by_request() -> None:
    tokens = {**{f"a{i}": 10 for i in range(4)}, **{f"b{i}": 10 for i in range(4)}}
    changes, _, _ = changed(lockstep("ab"), staged(("a", 3), ("b", 3)), tokens, 10)
    order = flip_order(changes, {"a": 40, "b": 40})
    assert not all(flip.ends for flip in order.flips)
    assert order.staged_bytes == 0
    replay(changes, order, {"a": 40, "b": 40})


def test_without_any_room_the_first_layer_waits_in_host_memory() -> None:
    tokens = {"a": 10, "b": 8}
    changes, _, _ = changed(lockstep("ab"), staged(("a", 3), ("b", 3)), tokens, 100)
    order = flip_order(changes, {"a": 0, "b": 0})
    assert order.staged_bytes == 4 * 8  # the smaller one
    assert sum(flip.staged_bytes > 0 for flip in order.flips) == 1
    replay(changes, order, {"a": 0, "b": 0})


def test_a_cut_that_a_rank_cannot_hold_is_refused_in_words() -> None:
    changes, _, _ = changed(lockstep("ab"), staged(("a", 5), ("b", 1)), {"b0": 100, "a0": 1}, 1)
    with pytest.raises(CapacityError, match="rank 'a' has no room"):
        flip_order(changes, {"a": 10, "b": 10})
