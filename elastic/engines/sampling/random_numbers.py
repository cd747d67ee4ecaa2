"""Random numbers that depend on a seed and a position alone: an answer goes on with the same ones anywhere.

SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014), read as a counter-based
generator: its n-th output is the mix of key + n * gamma, in integers, hence the same on every machine.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from elastic.engines.base import Request

GAMMA = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def mix(value: int) -> int:
    """Return 64 bits that look independent of those of neighbouring values."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def random_key(seed: int) -> int:
    """Return the key of a seed's numbers, so that near seeds have distant sequences."""
    return mix(mix(seed & _MASK) ^ GAMMA)


def answer_seed(request: Request, index: int) -> int:
    """Return the seed of one of a request's answers: from its own seed, or a new one each time without."""
    seed = request.sampling.seed
    return secrets.randbits(64) if seed is None else mix((random_key(seed) + index * GAMMA) & _MASK)


def uniforms(keys: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) for each key at its position."""
    bits = np.array(keys, np.uint64) + np.array(positions, np.uint64) * np.uint64(GAMMA)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    numbers: npt.NDArray[np.float64] = ((bits ^ (bits >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53
    return numbers
