from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic.planning.sharding.numbers import shared_out


def test_each_is_asked_for_about_as_many() -> None:
    assert shared_out([3, 1, 2, 0], {"a": {0, 1, 2, 3}, "b": {0, 1, 2, 3}}) == {"a": (0, 2), "b": (1, 3)}
    assert shared_out(range(4), {"a": {0}, "b": {1}, "c": {7}}) == {"a": (0,), "b": (1,)}
    assert shared_out([], {"a": {0}}) == shared_out([0], {}) == {}


@given(st.sets(st.integers(0, 9)), st.dictionaries(st.sampled_from("abcd"), st.sets(st.integers(0, 9)), max_size=4))
def test_all_that_somebody_has_is_asked_for_once(wanted: set[int], have: dict[str, set[int]]) -> None:
    asked = shared_out(wanted, have)
    assert all(theirs and have[name].issuperset(theirs) for name, theirs in asked.items())
    assert sorted(number for theirs in asked.values() for number in theirs) == sorted(
        wanted & set().union(*have.values())
    )
