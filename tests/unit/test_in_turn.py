from __future__ import annotations

import itertools

import pytest

from support.architectures import in_turn


@pytest.mark.parametrize("second", [[1, 2], [1, 2, 3]])
def test_each_value_has_one_of_the_other_axis_and_every_pair_is_run_at_last(second: list[int]) -> None:
    pairs = in_turn("abcd", second)
    assert {pair.values for pair in pairs} == set(itertools.product("abcd", second))
    soon = [pair.values for pair in pairs if not pair.marks]
    assert [a for a, _ in soon] == list("abcd")
    assert {b for _, b in soon} == set(second)
    assert {mark.name for pair in pairs for mark in pair.marks} == {"long"}
