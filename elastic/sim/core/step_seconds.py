"""Seconds of steps: from costs that were fitted to measurements, or from data sheets, with noise."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from elastic.planning.pipeline.chunk_cost import Chunk


class StepCost(Protocol):
    """Seconds of batches, such as of `ChunkCost`, `Roofline`, or `InstanceCost` by `of_instance`."""

    def batch(self, chunks: Sequence[Chunk]) -> float:
        """Return the seconds of a batch."""


class Noise:
    """Factors of the seconds of steps: lognormal around a mean of 1, or drawn from those that were measured."""

    def __init__(self, spread: float | Sequence[float], choose: random.Random) -> None:
        """`spread`: sigma of the logarithm, 0 for none; or measured factors."""
        self._measured = () if isinstance(spread, float | int) else tuple(spread)
        self._choose = choose
        if self._measured:
            self.mean = math.fsum(self._measured) / len(self._measured)
            self.sigma = math.sqrt(math.fsum((f - self.mean) ** 2 for f in self._measured) / len(self._measured))
        else:
            assert isinstance(spread, float | int)
            self.mean, self.sigma = 1.0, float(spread)

    def __call__(self, steps: int = 1) -> float:
        """Draw the mean factor of so many steps together."""
        if not self.sigma:
            return self.mean
        if self._measured and steps == 1:
            return self._choose.choice(self._measured)
        sigma = self.sigma / (self.mean * math.sqrt(steps))
        return self.mean * math.exp(self._choose.gauss(-sigma * sigma / 2, sigma))


@dataclass(frozen=True)
class FixedSeconds:
    """The same for each step: for tests."""

    seconds: float

    def batch(self, chunks: Sequence[Chunk]) -> float:
        """Return it."""
        return self.seconds
