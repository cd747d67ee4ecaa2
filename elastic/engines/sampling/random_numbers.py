"""Random numbers that depend on a seed and a position alone: an answer goes on with the same ones anywhere.

SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014), read as a counter-based
generator: its n-th output is the mix of key + n * gamma. All is computed in integers, hence the same on every device.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np
import torch

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


def exponentials(
    keys: Sequence[int], positions: Sequence[int], tokens: torch.Tensor, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Return float32 numbers, exponentially distributed with mean 1, of tokens, [count], integers.

    [keys, count]: for each key at its position; with `rows`, [count]: of each token that of one of them, [count].
    A token is hashed together with 64 bits of the key and the position by the steps of Wellons' lowbias32 (2018), in
    integers of 32 bits that wrap around. Small numbers, which decide, have all the bits of their mantissa.
    """
    bits = [mix((key + (position + 1) * GAMMA) & _MASK) for key, position in zip(keys, positions, strict=True)]
    words = torch.from_numpy(np.array(bits, np.uint64).view(np.int32).reshape(-1, 2)).to(tokens.device)
    low, high = (words[:, None] if rows is None else words[rows]).unbind(-1)
    x = tokens.int() * (0x9E3779B9 - 2**32) + low
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x ^= high
    x *= 0x846CA68B - 2**32
    x ^= (x >> 16) & 0xFFFF
    uniform = (x & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)
    return uniform.neg_().log1p_().neg_()
