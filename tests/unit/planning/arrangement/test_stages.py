from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import ConfigError
from elastic.planning.arrangement.stages import EXACT, Held, stages
from support.planning.every_cut import best_score, random_ranks

ALL = frozenset(range(6))


@given(st.integers(0, 1 << 30))
def test_it_is_the_best_of_all_cuts_in_any_order_of_ranks(seed: int) -> None:
    choose = random.Random(seed)
    cost = [choose.randint(1, 9) for _ in range(choose.randint(1, 6))]
    members = random_ranks(choose, len(cost))
    nbytes = [2 * one for one in cost]
    best = best_score(members, cost, nbytes, 2.0, 5.0)
    found = stages(members, cost, nbytes, first=2.0, last=5.0)
    assert (found is None) == (best is None)
    if found is not None:
        assert (found.fetched_bytes, found.bottleneck, found.moved_bytes) == best
        assert sorted(i for run in found.layers for i in run) == list(range(len(cost)))
        assert [[i for i in run if i not in m.layers] for m, run in zip(members, found.layers, strict=True)] == [
            list(fetched) for fetched in found.fetched
        ]


def test_nothing_is_fetched_where_that_can_be_avoided() -> None:
    second = [Held("b", frozenset(range(4, 6))), Held("a", ALL), Held("c", frozenset(range(3)))]
    found = stages(second, [1.0] * 6, [1] * 6)
    assert found is not None
    assert found.layers == (range(4, 6), range(2, 4), range(2))
    assert found.fetched == ((), (), ())
    apart = stages([Held("a", frozenset({0})), Held("b", frozenset({0}))], [1.0] * 2, [7] * 2)
    assert apart is not None
    assert apart.fetched_bytes == 7


def test_the_head_counts_as_work_of_the_last_stage() -> None:
    both = [Held("a", ALL), Held("b", ALL)]
    found = stages(both, [1.0] * 6, [1] * 6, last=2.0)
    assert found is not None
    assert found.layers == (range(4), range(4, 6))


def test_a_rank_with_less_room_has_fewer_layers() -> None:
    found = stages([Held("a", ALL, room_bytes=20), Held("b", ALL, room_bytes=100)], [1.0] * 6, [10] * 6)
    assert found is not None
    assert [len(run) for run in found.layers] == [2, 4]
    assert stages([Held("a", ALL, room_bytes=20), Held("b", ALL, room_bytes=30)], [1.0] * 6, [10] * 6) is None


def test_of_equal_cuts_the_one_that_moves_least() -> None:
    members = [Held("a", ALL, kv_bytes=(0, 0, 0, 9, 9, 9)), Held("b", ALL, kv_bytes=(9, 9, 9, 0, 0, 0))]
    found = stages(members, [1.0] * 6, [1] * 6)
    assert found is not None
    assert found.layers == (range(3, 6), range(3))
    assert found.moved_bytes == 0


def test_many_ranks_stand_in_the_order_of_their_layers() -> None:
    count = EXACT + 4
    layers = 3 * count
    members = [Held(f"r{i}", frozenset(range(3 * i, 3 * i + 3))) for i in reversed(range(count))]
    found = stages(members, [1.0] * layers, [1] * layers)
    assert found is not None
    assert found.fetched_bytes == 0
    assert found.bottleneck == 3


@pytest.mark.parametrize("count", [2, 3])
def test_more_ranks_than_layers_are_no_pipeline(count: int) -> None:
    assert stages([Held(str(i), frozenset({0})) for i in range(count)], [1.0], [1]) is None


def test_what_does_not_fit_together_is_refused() -> None:
    for members, cost, nbytes in ([], [1.0], [1]), ([Held("a", ALL)], [1.0], [1, 2]):
        with pytest.raises(ConfigError):
            stages(members, cost, nbytes)
    with pytest.raises(ConfigError):
        stages([Held("a", ALL, kv_bytes=(1,))], [1.0, 1.0], [1, 1])


def test_all_small_groups_of_ranks_that_dropped_before_need_no_fetch() -> None:
    """Any two or three that came of halves, and a whole one, can be a pipeline of what they hold."""
    halves = [frozenset(range(3)), frozenset(range(3, 6)), ALL]
    for chosen in product(halves, repeat=3):
        if frozenset().union(*chosen) == ALL:
            found = stages([Held(str(i), layers) for i, layers in enumerate(chosen)], [1.0] * 6, [1] * 6)
            assert found is not None
            assert found.fetched_bytes == 0
