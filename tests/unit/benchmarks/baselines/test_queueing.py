"""First come, first served: nobody overtakes, and no device does two things at once."""

from __future__ import annotations

import itertools
import math

import pytest
from baselines.queueing import FirstComeFirstServed
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import ConfigError

seconds = st.integers(1, 9).map(float)
devices = st.sets(st.sampled_from("abc"), min_size=1).map(sorted)
requests = st.lists(
    st.tuples(st.integers(0, 5), st.lists(st.tuples(devices, seconds), min_size=1, max_size=3)), min_size=1, max_size=8
)


@given(gaps=st.lists(st.tuples(st.integers(0, 9), seconds), min_size=1, max_size=20))
def test_one_device_is_a_queue(gaps: list[tuple[int, float]]) -> None:
    """Lindley: who comes begins when it is there and the one before has ended."""
    queue, at_s, end_s = FirstComeFirstServed("a"), 0.0, 0.0
    for gap, taken in gaps:
        at_s += gap
        number = queue.submit(at_s, [("a", taken)])
        queue.advance(at_s)
        end_s = max(at_s, end_s) + taken
        assert queue.ends_s[number] == end_s == queue.free_s("a")
    assert queue.busy_s("a", 0.0, end_s) == sum(taken for _, taken in gaps)


@given(given_=requests)
def test_nobody_overtakes_and_no_device_does_two_things_at_once(
    given_: list[tuple[int, list[tuple[list[str], float]]]],
) -> None:
    queue, at_s, arrivals = FirstComeFirstServed("abc"), 0.0, []
    for gap, operations in given_:
        at_s += gap
        queue.advance(at_s)
        arrivals.append(at_s)
        queue.submit(at_s, operations)
    queue.advance()
    for name in "abc":
        spans = queue._busy[name]
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    for arrived_s, end_s, (_, operations) in zip(arrivals, queue.ends_s, given_, strict=True):
        assert arrived_s + sum(taken for _, taken in operations) <= end_s < math.inf
    total = sum(len(names) * taken for _, operations in given_ for names, taken in operations)
    assert sum(queue.busy_s(name, 0.0, 1e9) for name in "abc") == total


def test_who_needs_several_devices_waits_for_all_and_is_not_overtaken_at_any() -> None:
    queue = FirstComeFirstServed("ab")
    first = queue.submit(0.0, [("a", 2.0), ("b", 3.0)])
    second = queue.submit(1.0, [("a", 2.0), ("b", 3.0)])
    both = queue.submit(1.5, [("ab", 1.0)])
    queue.advance()
    # `both` is ready before the first request's second stage, and a is free at 4
    assert [queue.ends_s[number] for number in (both, first, second)] == [5.0, 8.0, 11.0]
    assert queue.load("a", 6.0, 6.0) == pytest.approx(5 / 6)
    assert queue.load("b", 6.0, 2.0) == 1.0


def test_what_is_too_late_or_nothing_is_refused() -> None:
    queue = FirstComeFirstServed("a")
    queue.advance(5.0)
    with pytest.raises(ConfigError, match="comes too late"):
        queue.submit(4.0, [("a", 1.0)])
    with pytest.raises(ConfigError, match="with 0 stages"):
        queue.submit(6.0, [])
