"""Free pages are a set that keeps blocks whole as long as it can."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.memory.pages.free_pages import FreePages

PAGES = 50
CALLS = st.tuples(st.sampled_from(["add", "take", "take_whole", "take_last"]), st.integers(0, PAGES), st.randoms())


@given(st.integers(1, 9), st.lists(CALLS, max_size=30))
def test_it_is_a_set_whose_blocks_break_only_when_nothing_else_is_left(size: int, calls: list[tuple]) -> None:
    free, there = FreePages(size, PAGES), set(range(PAGES))
    for call, count, choose in calls:
        whole = whole_pages(there, size)
        if call == "add":
            away = sorted(set(range(PAGES)) - there)
            new = choose.sample(away, min(count, len(away)))
            free.add(new)
            there.update(new)
        else:
            count = min(count, len(there))
            taken = getattr(free, call)(count)
            assert len(set(taken)) == len(taken)
            assert set(taken) <= there
            there.difference_update(taken)
            if call == "take_whole":
                assert len(taken) == min(count // size, len(whole) // size) * size
                assert set(taken) <= whole
            else:
                assert len(taken) == count
            if call == "take":  # of blocks only what loose pages lack, rounded up
                lost = len(whole) - len(whole_pages(there, size))
                assert lost == -(-max(0, count - (len(there) + count - len(whole))) // size) * size
        assert sorted(free) == sorted(there)
        assert (len(free), free.whole) == (len(there), len(whole_pages(there, size)))


def whole_pages(pages: set[int], size: int) -> set[int]:
    blocks = (range(first, first + size) for first in range(0, PAGES, size))
    return {page for block in blocks if pages.issuperset(block) for page in block}


@pytest.mark.parametrize(
    ("take", "expected"),
    [
        (lambda free: free.take(3), [0, 1, 2]),
        (lambda free: free.take_whole(9), [0, 1, 2, 3, 4, 5, 6, 7]),
        (lambda free: free.take_last(5), [4, 5, 6, 7, 9]),
        (lambda free: free.take_last(3), [9, 8, 7]),
    ],
)
def test_the_lowest_are_taken_and_the_highest_given_back(
    take: Callable[[FreePages], list[int]], expected: list[int]
) -> None:
    assert take(FreePages(4, 10)) == expected
