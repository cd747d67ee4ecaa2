"""How the requests of a batch are shared out between places."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.hooks.replicas.request_balance import share_requests

TOKENS = st.lists(st.integers(1, 60), min_size=1, max_size=20)


@pytest.mark.parametrize(
    ("tokens", "seconds", "requests"),
    [
        ([1] * 8, [1, 1], (4, 4)),
        ([1] * 9, [1, 1, 1], (3, 3, 3)),
        ([1] * 9, [1, 2], (6, 3)),
        ([1] * 16, [1, 1.2], (8, 8)),  # hardly faster: all places get alike
        ([1, 1, 1, 1, 60], [1, 1], (4, 1)),
        ([60, 1, 1, 1, 1], [1, 1], (1, 4)),
        ([1, 1, 60], [1, 100], (2, 1)),  # it is still measured
        ([1, 60, 1], [1, 1, 1], (1, 1, 1)),
        ([40], [100, 1], (1, 0)),  # the first place's layer is called in any case
        ([5, 5], [1, 5, 1], (1, 0, 1)),
    ],
)
def test_requests_go_whole_and_in_order(tokens: list[int], seconds: list[float], requests: tuple[int, ...]) -> None:
    assert share_requests(tokens, seconds) == requests


@given(TOKENS, st.lists(st.floats(0.01, 100), min_size=1, max_size=4))
def test_every_place_gets_requests_as_far_as_there_are_some(tokens: list[int], seconds: list[float]) -> None:
    requests = share_requests(tokens, seconds)
    assert sum(requests) == len(tokens)
    assert requests[0] > 0
    assert sum(map(bool, requests)) == min(len(tokens), len(seconds))


@given(TOKENS.filter(lambda tokens: len(tokens) > 1))
def test_no_other_cut_between_two_alike_places_is_faster(tokens: list[int]) -> None:
    first = share_requests(tokens, [1, 1])[0]
    longest = [max(sum(tokens[:cut]), sum(tokens[cut:])) for cut in range(1, len(tokens))]
    assert longest[first - 1] == min(longest)
