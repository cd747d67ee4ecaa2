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
    """Factors around a mean of 1, lognormal, as measured steps have them; sigma of their logarithm. 0: none."""

    def __init__(self, sigma: float, choose: random.Random) -> None:
        self.sigma = sigma
        self._choose = choose

    def __call__(self, steps: int = 1) -> float:
        """Draw the factor of so many steps together."""
        if not self.sigma:
            return 1.0
        sigma = self.sigma / math.sqrt(steps)
        return math.exp(self._choose.gauss(-sigma * sigma / 2, sigma))


@dataclass(frozen=True)
class FixedSeconds:
    """The same for each step: for tests."""

    seconds: float

    def batch(self, chunks: Sequence[Chunk]) -> float:
        """Return it."""
        return self.seconds
