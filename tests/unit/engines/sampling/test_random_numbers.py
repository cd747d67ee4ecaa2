"""Random numbers: the same for a seed and a position everywhere, and as good as independent otherwise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.engines.base import Request, Sampling
from elastic.engines.sampling.random_numbers import GAMMA, answer_seed, exponentials, mix, random_key

SEEDS = st.integers(-(2**63), 2**64 - 1)
BINS, DRAWS = 256, 1 << 13
FAR = 256 + 6 * (2 * 256) ** 0.5
"""Of a chi-square with 255 degrees of freedom: six standard deviations above its mean."""

GOLDEN_KEYS = ["e220a8397b1dcdaf", "07776f161bd8ea27", "158ed36505bc3e75", "cea3616b3d2feb54"]
GOLDEN_NUMBERS = [0.628815770149231, 1.1025078296661377, 0.6730636358261108, 0.37553268671035767]


def chi_square(numbers: np.ndarray) -> float:
    counts = np.bincount((numbers * BINS).astype(int), minlength=BINS)
    expected = len(numbers) / BINS
    return float(((counts - expected) ** 2 / expected).sum())


def test_numbers_are_the_same_on_every_machine() -> None:
    keys = [random_key(seed) for seed in (0, 1, -1, 2**63)]
    assert [f"{key:016x}" for key in keys] == GOLDEN_KEYS
    numbers = exponentials(keys, [0, 1, 2, 2**40], torch.arange(1000))
    assert numbers[[0, 1, 2, 3], [0, 1, 999, 500]].tolist() == pytest.approx(GOLDEN_NUMBERS, rel=1e-6)


def plain(key: int, position: int, count: int) -> np.ndarray:
    """Their places in the distribution, in unsigned integers and float64."""
    bits = mix((key + (position + 1) * GAMMA) % 2**64)
    x = np.arange(count, dtype=np.uint32) * np.uint32(0x9E3779B9) + np.uint32(bits % 2**32)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15)) ^ np.uint32(bits >> 32)) * np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return ((x % 2**31).astype(float) + 0.5) / 2**31


@given(st.lists(st.tuples(SEEDS, st.integers(0, 2**40)), min_size=1, max_size=5), st.integers(1, 300))
def test_numbers_depend_on_their_seed_and_position_alone(pairs: list[tuple[int, int]], count: int) -> None:
    keys, positions = [random_key(seed) for seed, _ in pairs], [position for _, position in pairs]
    together = exponentials(keys, positions, torch.arange(count))
    assert together.shape == (len(pairs), count)
    assert bool((together > 0).all())
    for row, key, position in zip(together, keys, positions, strict=True):
        np.testing.assert_allclose(-np.expm1(-row.double().numpy()), plain(key, position, count), rtol=1e-5)


def uniform(keys: list[int], positions: list[int], count: int) -> np.ndarray:
    """The numbers by their own cumulative distribution."""
    return -np.expm1(-exponentials(keys, positions, torch.arange(count)).double().numpy())


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_numbers_of_one_draw_are_exponential_and_neighbours_independent(seed: int) -> None:
    (numbers,) = uniform([random_key(seed)], [3], DRAWS)
    assert chi_square(numbers) < FAR
    pairs = (np.floor(numbers[:-1] * 16) * 16 + np.floor(numbers[1:] * 16)) / BINS
    assert chi_square(pairs) < FAR


@pytest.mark.parametrize("token", [0, 1, 1000])
def test_numbers_of_one_token_are_independent_over_positions_and_seeds(token: int) -> None:
    over_positions = uniform([random_key(7)] * DRAWS, list(range(DRAWS)), token + 1)[:, token]
    over_seeds = uniform([random_key(seed) for seed in range(DRAWS)], [5] * DRAWS, token + 1)[:, token]
    for numbers in (over_positions, over_seeds):
        assert chi_square(numbers) < FAR
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 6 / DRAWS**0.5


def test_two_draws_are_no_shifts_of_each_other() -> None:
    one, other = uniform([random_key(1), random_key(2)], [0, 0], 4096)
    assert np.intersect1d(one, other).size < 40


def test_answers_of_a_seeded_request_have_seeds_of_their_own_and_the_same_again() -> None:
    seeded = Request((1,), 1, Sampling(1.0, seed=7), n=100)
    seeds = [answer_seed(seeded, index) for index in range(100)]
    assert seeds == [answer_seed(seeded, index) for index in range(100)]
    assert len(set(seeds)) == 100
    assert answer_seed(Request((1,), 1, Sampling(1.0, seed=8)), 0) not in seeds


def test_answers_without_a_seed_differ_each_time() -> None:
    request = Request((1,), 1, Sampling(1.0))
    assert len({answer_seed(request, 0) for _ in range(10)}) == 10
