"""The length that nine of ten answers do not exceed, and how long a queue lasts, by the requests that ended of late."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic.cluster.fleet.planning.request_statistics import AnswerLengths, DrainRate


def test_nothing_is_known_before_an_answer_has_ended() -> None:
    assert AnswerLengths().usual() is None


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=600))
def test_nine_of_ten_of_the_last_answers_are_no_longer_and_a_shorter_one_would_not_do(lengths: list[int]) -> None:
    answers = AnswerLengths(maxlen=256)
    for length in lengths:
        answers.append(length)
    last, usual = lengths[-256:], answers.usual()
    assert usual in last
    assert sum(length <= usual for length in last) >= 0.9 * len(last)
    assert sum(length < usual for length in last) < 0.9 * len(last)


def test_a_longer_queue_takes_longer_and_a_faster_fleet_less() -> None:
    slow, fast = DrainRate(), DrainRate()
    for i in range(20):
        slow.append(i * 2.0)
        fast.append(38 + i * 0.1)
    assert slow.wait_s(10, 40.0) == 20.0
    assert slow.wait_s(20, 40.0) == 40.0
    assert fast.wait_s(100, 40.0) == 10.0
    assert fast.wait_s(100, 80.0) > 60 - 1e-9  # nothing has ended for long


def test_it_is_a_second_at_least_and_a_minute_at_most() -> None:
    rate = DrainRate()
    assert rate.wait_s(1000, 0.0) == 1.0
    rate.append(0.0)
    rate.append(0.0)
    assert rate.wait_s(1, 0.0) == 1.0
    assert rate.wait_s(10**9, 1.0) == 60.0
