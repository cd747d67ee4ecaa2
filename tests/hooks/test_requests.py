"""How the requests of a batch are shared out between places."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.hooks.requests import TokenSpeeds, share_requests

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


def test_places_are_compared_where_they_had_as_many_tokens() -> None:
    speeds = TokenSpeeds()
    assert speeds.of(["a", "b"]) == [1.0, 1.0]
    for place, tokens, seconds in (("a", 8, 1.0), ("b", 1, 1.0), ("b", 64, 4.0)):
        for _ in range(2):
            speeds.measured(place, tokens, seconds)
    assert speeds.of(["a", "b"]) == [1.0, 1.0]  # nothing that both have had
    for _ in range(2):
        speeds.measured("b", 9, 2.25)
    a, b = speeds.of(["a", "b"])
    assert b == 2 * a
    assert speeds.of(["a", "b", "c"]) == [1.0] * 3


@pytest.mark.parametrize("fixed", [0.0, 1.0, 50.0])
@pytest.mark.parametrize("slow", [1.0, 3.0])
def test_a_place_with_a_smaller_share_gets_no_less_for_it(fixed: float, slow: float) -> None:
    speeds, shares = TokenSpeeds(), [8, 8]
    speeds.measured("a", 1, 9.0)  # a slow first step is forgotten
    for _ in range(50):
        for place, count, factor in zip("ab", shares, (1.0, slow), strict=True):
            speeds.measured(place, count, factor * (fixed + count))
        shares = list(share_requests([1] * 16, speeds.of("ab")))
    assert shares in ([[8, 8]] if slow == 1 else [[12, 4], [13, 3]])
