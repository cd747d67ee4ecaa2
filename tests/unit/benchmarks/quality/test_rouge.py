"""ROUGE-L of token ids, against its definition."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quality.rouge import longest_common_subsequence, rouge_l

TOKENS = st.lists(st.integers(0, 3), max_size=7)


def subsequences(tokens: list[int]) -> set[tuple[int, ...]]:
    return {c for k in range(len(tokens) + 1) for c in combinations(tokens, k)}


@given(TOKENS, TOKENS)
def test_the_length_is_that_of_the_longest_of_all_common_subsequences(a: list[int], b: list[int]) -> None:
    assert longest_common_subsequence(a, b) == max(map(len, subsequences(a) & subsequences(b)))


@given(TOKENS, TOKENS)
def test_it_is_a_share_one_for_equals_and_the_same_both_ways(a: list[int], b: list[int]) -> None:
    assert 0 <= rouge_l(a, b) <= 1
    assert rouge_l(a, b) == pytest.approx(rouge_l(b, a))
    assert rouge_l(a, a) == 1.0
    assert (rouge_l(a, b) == 0) == (bool(a or b) and not set(a) & set(b))


def test_the_examples_of_the_paper() -> None:
    police, kill, the, gunman, killed = range(5)
    reference = [police, killed, the, gunman]
    assert rouge_l([police, kill, the, gunman], reference) == pytest.approx(3 / 4)
    assert rouge_l([the, gunman, kill, police], reference) == pytest.approx(2 / 4)
    assert rouge_l([the, gunman, police, killed], reference) == pytest.approx(2 / 4)


def test_beta_weighs_recall() -> None:
    candidate, reference = [1, 2], [1, 2, 3, 4]
    assert rouge_l(candidate, reference) == pytest.approx(2 / 3)
    assert rouge_l(candidate, reference, beta=1e6) == pytest.approx(0.5)
    assert rouge_l(candidate, reference, beta=1e-6) == pytest.approx(1.0)
