"""Random numbers: the same for a seed and a position everywhere, and as good as independent otherwise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.engines.base import Request, Sampling
from elastic.engines.sampling.random_numbers import GAMMA, answer_seed, mix, random_key, uniforms

SEEDS = st.integers(-(2**63), 2**64 - 1)
BINS, DRAWS = 256, 1 << 14
FAR = 256 + 6 * (2 * 256) ** 0.5
"""Of a chi-square with 255 degrees of freedom: six standard deviations above its mean."""

GOLDEN_KEYS = ["e220a8397b1dcdaf", "07776f161bd8ea27", "158ed36505bc3e75", "cea3616b3d2feb54"]
GOLDEN_NUMBERS = [0.28176129772258496, 0.43216139623506244, 0.730444934162396, 0.36528712872090585]


def chi_square(numbers: np.ndarray) -> float:
    counts = np.bincount((numbers * BINS).astype(int), minlength=BINS)
    expected = len(numbers) / BINS
    return float(((counts - expected) ** 2 / expected).sum())


def test_numbers_are_the_same_on_every_machine() -> None:
    keys = [random_key(seed) for seed in (0, 1, -1, 2**63)]
    assert [f"{key:016x}" for key in keys] == GOLDEN_KEYS
    assert uniforms(keys, [0, 1, 2, 2**40]).tolist() == GOLDEN_NUMBERS


@given(st.lists(st.tuples(SEEDS, st.integers(0, 2**40)), min_size=1, max_size=20))
def test_a_number_depends_on_its_seed_and_position_alone(pairs: list[tuple[int, int]]) -> None:
    together = uniforms([random_key(seed) for seed, _ in pairs], [position for _, position in pairs])
    alone = [(mix((random_key(seed) + position * GAMMA) % 2**64) >> 11) * 2.0**-53 for seed, position in pairs]
    assert together.tolist() == alone
    assert all(0 <= number < 1 for number in alone)


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_numbers_of_one_seed_are_uniform_and_neighbours_independent(seed: int) -> None:
    numbers = uniforms([random_key(seed)] * DRAWS, range(DRAWS))
    assert chi_square(numbers) < FAR
    pairs = (np.floor(numbers[:-1] * 16) * 16 + np.floor(numbers[1:] * 16)) / BINS
    assert chi_square(pairs) < FAR


@pytest.mark.parametrize("position", [0, 1, 1000])
def test_numbers_of_neighbouring_seeds_are_independent(position: int) -> None:
    numbers = uniforms([random_key(seed) for seed in range(DRAWS)], [position] * DRAWS)
    assert chi_square(numbers) < FAR
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 6 / DRAWS**0.5


def test_answers_of_a_seeded_request_have_seeds_of_their_own_and_the_same_again() -> None:
    seeded = Request((1,), 1, Sampling(1.0, seed=7), n=100)
    seeds = [answer_seed(seeded, index) for index in range(100)]
    assert seeds == [answer_seed(seeded, index) for index in range(100)]
    assert len(set(seeds)) == 100
    assert answer_seed(Request((1,), 1, Sampling(1.0, seed=8)), 0) not in seeds


def test_answers_without_a_seed_differ_each_time() -> None:
    request = Request((1,), 1, Sampling(1.0))
    assert len({answer_seed(request, 0) for _ in range(10)}) == 10
