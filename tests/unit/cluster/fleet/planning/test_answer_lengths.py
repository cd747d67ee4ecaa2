"""The length that nine of ten answers do not exceed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic.cluster.fleet.planning.answer_lengths import AnswerLengths


def test_nothing_is_known_before_an_answer_has_ended() -> None:
    assert AnswerLengths().usual() is None


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=600))
def test_nine_of_ten_of_the_last_answers_are_no_longer_and_a_shorter_one_would_not_do(lengths: list[int]) -> None:
    answers = AnswerLengths()
    for length in lengths:
        answers.note(length)
    last, usual = lengths[-256:], answers.usual()
    assert usual in last
    assert sum(length <= usual for length in last) >= 0.9 * len(last)
    assert sum(length < usual for length in last) < 0.9 * len(last)
