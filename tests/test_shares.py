"""How the rows of a batch are shared out between places."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.hooks.shares import WARM_UP, Speeds, share_out

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
        (2, [1, 5, 1], (1, 0, 1)),
        (3, [1, 5, 1], (1, 1, 1)),
    ],
)
def test_rows_go_where_they_are_done_first(batch: int, seconds: list[float], rows: tuple[int, ...]) -> None:
    assert share_out(batch, seconds) == rows


@given(st.integers(1, 40), st.lists(SECONDS, min_size=1, max_size=4))
def test_no_other_split_is_faster(batch: int, seconds: list[float]) -> None:
    rows = share_out(batch, seconds)
    assert sum(rows) == batch
    assert rows[0] > 0
    assert all(rows) or max(rows) == 1
    step = max(n * s for n, s in zip(rows, seconds, strict=True))
    for a in range(len(rows)):
        for b in range(len(rows)):
            if rows[a] > 1 and rows[b]:
                other = [n - (i == a) + (i == b) for i, n in enumerate(rows)]
                assert max(n * s for n, s in zip(other, seconds, strict=True)) >= step * (1 - 1e-9)


def test_rows_with_a_cache_move_only_where_it_pays() -> None:
    assert share_out(8, [1.0, 1.1], present=(2, 6)) == (4, 4)
    assert share_out(8, [1.0, 1.2], present=(4, 4)) == (4, 4)
    assert share_out(8, [1.0, 3.0], present=(4, 4)) == (6, 2)
    assert share_out(8, [1.0, 1.0], present=(8, 0)) == (4, 4)


def test_speeds_are_averages_of_what_was_seen_together() -> None:
    speeds = Speeds()
    assert speeds.of(["a", "b"]) == [1.0, 1.0]
    for _ in range(WARM_UP):
        speeds.measured({"a": 50.0, "b": 1.0})
    assert speeds.of(["a", "b"]) == [1.0, 1.0]
    speeds.measured({"a": 2.0, "b": 4.0})
    assert speeds.of(["a", "b"]) == [2.0, 4.0]
    speeds.measured({"a": 2.0, "b": 9.0})
    assert speeds.of(["b", "a"]) == [5.0, 2.0]
    assert speeds.of(["a", "c"]) == [1.0, 1.0]
