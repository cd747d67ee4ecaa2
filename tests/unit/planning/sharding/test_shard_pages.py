"""Pages of a layer by its parts: a page counts once, however many parts lie in it."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from elastic.planning.sharding.shard_pages import ShardPages

RUNS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), max_size=4).map(
    lambda runs: tuple(range(start, start + length) for start, length in runs)
)


@given(common=RUNS, parts=st.lists(RUNS, min_size=1, max_size=4), chosen=st.sets(st.integers(0, 3)))
def test_pages_are_those_of_all_that_is_kept(
    common: tuple[range, ...], parts: list[tuple[range, ...]], chosen: set[int]
) -> None:
    pages = ShardPages(common, tuple(parts))
    kept = {part for part in chosen if part < len(pages.parts)}
    runs = [*common, *(run for part in kept for run in parts[part])] if kept else []
    assert pages.numbers(kept) == {page for run in runs for page in run}
    assert pages.pages(kept) == len(pages.numbers(kept))
    assert pickle.loads(pickle.dumps(pages)) == pages


def test_a_page_in_which_two_parts_meet_stays_with_either() -> None:
    pages = ShardPages((range(2),), ((range(2, 5),), (range(4, 7),)))
    assert [pages.pages(parts) for parts in ((), (0,), (1,), (0, 1))] == [0, 5, 5, 7]
