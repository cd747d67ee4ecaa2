"""What instances are thought to have: the first blocks that are known, as many as fit, the last used stay."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic.cluster.fleet.planning.prefix_index import PrefixIndex, block_hashes

tokens = st.lists(st.integers(0, 2), max_size=24)


@given(tokens, tokens, st.integers(1, 5))
def test_equal_beginnings_have_equal_hashes(a: list[int], b: list[int], size: int) -> None:
    first, second = block_hashes(a, size), block_hashes(b, size)
    assert len(first) == len(a) // size
    for i, (x, y) in enumerate(zip(first, second, strict=False)):
        assert (x == y) == (a[: (i + 1) * size] == b[: (i + 1) * size])
    assert block_hashes([*a, *b], size, first) == block_hashes([*a, *b], size)


def test_an_instance_has_what_it_was_given_and_no_other_has() -> None:
    index, hashes = PrefixIndex(), block_hashes(range(20), 4)
    index.note("a", hashes[:3], 10)
    assert [index.cached(name, hashes) for name in "ab"] == [3, 0]
    assert index.cached("a", [b"other", *hashes]) == 0
    index.forget("a")
    assert index.cached("a", hashes) == 0


def test_what_was_not_used_for_the_longest_is_forgotten_and_the_end_of_a_prompt_first() -> None:
    index = PrefixIndex()
    old, new = block_hashes(range(20), 4), block_hashes(range(100, 120), 4)
    index.note("a", old, 8)
    index.note("a", new, 8)
    assert index.cached("a", new) == 5
    assert index.cached("a", old) == 3
    index.note("a", old, 4)
    assert (index.cached("a", old), index.cached("a", new)) == (4, 0)
