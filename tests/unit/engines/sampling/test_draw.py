"""Draws: of the distribution that a rule leaves, told here by sorting, whatever else is in the batch."""

from __future__ import annotations

import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.engines.base import Request, Sampling
from elastic.engines.sampling.draw import argmax, draw
from elastic.engines.sampling.random_numbers import exponentials
from elastic.engines.sampling.state import SamplingState

RULES = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.9]),
    top_k=st.sampled_from([None, 1, 2, 7, 40, 10_000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)
SIZES = st.sampled_from([2, 33, 500, 3000])
SEEDS = st.integers(0, 2**32)


def state(rule: Sampling, seed: int = 0, position: int = 0) -> SamplingState:
    return SamplingState(Request((1,), 9, rule), seed, [0] * position)


def scores(rows: int, vocabulary: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def distribution(logits: torch.Tensor, rule: Sampling) -> np.ndarray:
    """Temperature, min_p, top_k, top_p, one after another, in float64."""
    scaled = logits.double().numpy() / rule.temperature
    weights = np.exp(scaled - scaled.max())
    order = np.argsort(-weights)
    kept = order[weights[order] >= rule.min_p][: rule.top_k]
    total = weights[kept].sum()
    before = np.cumsum(weights[kept]) - weights[kept]
    kept = kept[before < rule.top_p * total] if rule.top_p < 1 else kept
    left = np.zeros_like(weights)
    left[kept] = weights[kept]
    return left / left.sum()


@given(RULES, SIZES, SEEDS, st.integers(0, 40))
def test_a_token_has_the_highest_probability_over_its_number(
    rule: Sampling, vocabulary: int, seed: int, position: int
) -> None:
    logits, drawn = scores(1, vocabulary, seed), state(rule, seed, position)
    (numbers,) = exponentials([drawn.key], [position], torch.arange(vocabulary)).double().numpy()
    quotients = distribution(logits[0], rule) / numbers
    (token,) = draw(logits, [drawn])
    assert quotients[token] >= quotients.max() * (1 - 1e-4)  # float32 against float64


def test_what_rounding_changes_seldom_changes_a_token() -> None:
    rows, noise = 2000, 1e-4
    logits, states = scores(rows, 1000, 0, 1.0), [state(Sampling(1.0), seed) for seed in range(rows)]
    before, after = draw(logits, states), draw(logits + scores(rows, 1000, 1, noise), states)
    assert sum(one != other for one, other in zip(before, after, strict=True)) < 10 * rows * noise


@given(st.lists(st.tuples(RULES, SEEDS, st.integers(0, 9)), min_size=2, max_size=6), SIZES, SEEDS)
def test_a_token_does_not_depend_on_the_batch(
    rows: list[tuple[Sampling, int, int]], vocabulary: int, seed: int
) -> None:
    logits, states = scores(len(rows), vocabulary, seed), [state(*row) for row in rows]
    alone = [draw(logits[row : row + 1], [states[row]])[0] for row in range(len(rows))]
    assert draw(logits, states) == alone
    assert draw(logits.flip(0), states[::-1]) == alone[::-1]


@pytest.mark.parametrize(
    "rule",
    [
        Sampling(1.0),
        Sampling(0.6),
        Sampling(1.0, top_k=5),
        Sampling(1.3, top_p=0.8),
        Sampling(1.0, min_p=0.1),
        Sampling(0.9, top_k=12, top_p=0.95, min_p=0.02),
    ],
    ids=str,
)
def test_draws_have_the_distribution_of_the_rule(rule: Sampling) -> None:
    draws, logits = 20_000, scores(1, 24, 5, 1.5)
    probabilities = distribution(logits[0], rule)
    tokens = draw(logits.expand(draws, -1), [state(rule, seed) for seed in range(draws)])
    counts, possible = np.bincount(tokens, minlength=24), probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible] * draws
    chi_square = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = possible.sum() - 1
    assert chi_square < freedom + 6 * math.sqrt(2 * freedom) + 10


@given(SIZES, SEEDS)
def test_the_coldest_is_the_likeliest_and_the_hottest_is_any(vocabulary: int, seed: int) -> None:
    logits = scores(1, vocabulary, seed)
    logits[0, 0] = -math.inf
    logits[0, 1] += 40
    assert draw(logits, [state(Sampling(1e-300), seed)]) == [1]
    (token,) = draw(logits, [state(Sampling(1e300), seed)])
    assert token != 0


def test_tokens_as_likely_as_the_last_stay() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 3.0]])
    for rule in (Sampling(1.0, top_k=1), Sampling(1.0, top_p=0.1), Sampling(1.0, min_p=1.0)):
        drawn = {draw(logits, [state(rule, seed)])[0] for seed in range(100)}
        assert drawn == {1, 3, 4}


def test_a_row_without_a_distribution_is_told_apart() -> None:
    logits = torch.zeros(3, 4)
    logits[0, 2], logits[1] = math.nan, -math.inf
    states = [state(Sampling(1.0, top_p=0.5, top_k=3)), state(Sampling(0.5)), state(Sampling(1.0))]
    tokens = draw(logits, states)
    assert tokens[:2] == [4, 4]
    assert tokens[2] < 4


@given(SIZES, SEEDS)
def test_the_first_of_the_highest_is_torchs(vocabulary: int, seed: int) -> None:
    ties = scores(4, vocabulary, seed, 1.0).round()
    ties[1, vocabulary // 2 :] = math.nan
    ties[2] = -math.inf
    assert argmax(ties) == ties.argmax(-1).tolist()
    assert argmax(ties)[0] == int((ties[0] == ties[0].max()).nonzero()[0])


@given(RULES, st.sampled_from([33, 3000]), SEEDS)
def test_few_tokens_are_drawn_from_as_all_are(rule: Sampling, vocabulary: int, seed: int) -> None:
    logits, states = scores(3, vocabulary, seed), [state(rule, number) for number in range(3)]
    drawn = []
    for few in (0, 10**9):  # one by one always, and never
        with mock.patch("elastic.engines.sampling.draw._FEW", few):
            drawn.append(draw(logits, states))
    assert drawn[0] == drawn[1]
