"""How the rows of a batch are shared out between places."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.hooks.replicas.load_balance import GAIN, WARM_UP, ThroughputEstimator, split_batch
from elastic.hooks.replicas.request_balance import share_requests

SECONDS = st.floats(0.01, 100)


@pytest.mark.parametrize(
    ("batch", "seconds", "rows"),
    [
        (8, [1, 1], (4, 4)),
        (9, [1, 1], (5, 4)),
        (9, [1, 2], (6, 3)),
        (8, [3, 1], (2, 6)),
        (8, [1, 100], (7, 1)),  # it is still measured
        (1, [100, 1], (1, 0)),  # the first place's layer is called in any case
        (16, [1, 1.2], (8, 8)),  # hardly faster: all places get alike
        (2, [1, 5, 1], (1, 0, 1)),
        (3, [1, 5, 1], (1, 1, 1)),
    ],
)
def test_rows_go_where_they_are_done_first(batch: int, seconds: list[float], rows: tuple[int, ...]) -> None:
    assert split_batch(batch, seconds) == rows


@given(st.integers(1, 40), st.lists(SECONDS, min_size=1, max_size=4))
def test_no_other_split_is_clearly_faster(batch: int, seconds: list[float]) -> None:
    rows = split_batch(batch, seconds)
    assert sum(rows) == batch
    assert rows[0] > 0
    assert all(rows) or max(rows) == 1
    step = max(n * s for n, s in zip(rows, seconds, strict=True))
    for a in range(len(rows)):
        for b in range(len(rows)):
            if rows[a] > 1 and rows[b]:
                other = [n - (i == a) + (i == b) for i, n in enumerate(rows)]
                assert max(n * s for n, s in zip(other, seconds, strict=True)) >= step * GAIN * (1 - 1e-9)


def test_rows_with_a_cache_move_only_where_it_pays() -> None:
    assert split_batch(8, [1.0, 1.1], present=(2, 6)) == (4, 4)
    assert split_batch(8, [1.0, 1.2], present=(4, 4)) == (4, 4)
    assert split_batch(8, [1.0, 3.0], present=(4, 4)) == (6, 2)
    assert split_batch(8, [1.0, 1.0], present=(8, 0)) == (4, 4)


def test_places_are_compared_while_another_thread_measures() -> None:
    """What the other thread does comes here in the middle of a comparison of names."""
    speeds = ThroughputEstimator()

    class Compared(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            for tokens in (16, 64) if other == "b" else ():
                for _ in range(WARM_UP + 1):
                    speeds.measured("b", tokens, 1.0)
            return str.__eq__(self, other)

    for place in ("b", "a"):
        for _ in range(WARM_UP + 1):
            speeds.measured(place, 1, 2.0)
    assert speeds.of([Compared("a"), "b"]) == [4.0, 4.0]


def test_one_row_tries_the_places_and_stays_unless_another_is_clearly_faster() -> None:
    speeds, places = ThroughputEstimator(), ["a", "b", "c"]
    assert speeds.best_alone(places) == 0
    assert speeds.best_alone(places, present=2) == 2
    for place, seconds in (("a", 2.0), ("b", 1.9), ("c", 1.0)):
        assert speeds.best_alone(places) == places.index(place)
        for _ in range(WARM_UP):
            speeds.measured(place, 1, 50.0)
        assert not speeds.knows_alone(place)
        speeds.measured(place, 1, seconds)
    assert speeds.best_alone(places[:2]) == 0
    assert speeds.best_alone(places[:2], present=1) == 1
    assert speeds.best_alone(places, present=1) == 2


def test_places_are_compared_where_they_had_as_many_tokens() -> None:
    speeds = ThroughputEstimator()
    assert speeds.of(["a", "b"]) == [1.0, 1.0]
    for place, tokens, seconds in (("a", 8, 1.0), ("b", 1, 1.0), ("b", 64, 4.0)):
        for _ in range(WARM_UP + 1):
            speeds.measured(place, tokens, seconds)
    assert speeds.of(["a", "b"]) == [1.0, 1.0]  # nothing that both have had
    for _ in range(WARM_UP + 1):
        speeds.measured("b", 9, 2.25)
    a, b = speeds.of(["a", "b"])
    assert b == 2 * a
    assert speeds.of(["a", "b", "c"]) == [1.0] * 3


@pytest.mark.parametrize("share", [split_batch, lambda batch, seconds: share_requests([1] * batch, seconds)])
@pytest.mark.parametrize("fixed", [0.0, 1.0, 50.0])
@pytest.mark.parametrize("slow", [1.0, 3.0])
def test_a_place_with_a_smaller_share_gets_no_less_for_it(fixed: float, slow: float, share: Any) -> None:
    speeds, rows = ThroughputEstimator(), [8, 8]
    speeds.measured("a", 1, 9.0)  # a slow first step is forgotten
    for _ in range(50):
        for place, count, factor in zip("ab", rows, (1.0, slow), strict=True):
            speeds.measured(place, count, factor * (fixed + count))
        rows = list(share(16, speeds.of("ab")))
    assert rows in ([[8, 8]] if slow == 1 else [[12, 4], [13, 3]])
