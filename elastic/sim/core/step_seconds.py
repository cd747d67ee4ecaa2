"""Seconds of steps: from costs that were fitted to measurements, or from data sheets, with noise."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from elastic.planning.pipeline.chunk_cost import Chunk

ALIKE = 100
"""Of measured steps, so many of the nearest seconds are taken to be alike."""


class StepCost(Protocol):
    """Seconds of batches, such as of `ChunkCost`, `Roofline`, or `InstanceCost` by `of_instance`."""

    def batch(self, chunks: Sequence[Chunk]) -> float:
        """Return the seconds of a batch."""


class MeasuredStep(NamedTuple):
    """A step that was measured."""

    cost_s: float
    """What the cost says."""
    factor: float
    """The seconds that it took, over these."""


class Noise:
    """Factors of the seconds of steps: lognormal around a mean of 1, or drawn from those that were measured.

    A process that waits for its core does so for as long in a short step as in a long one. So factors are those of the
    steps whose seconds were the most alike.
    """

    def __init__(self, spread: float | Sequence[MeasuredStep], choose: random.Random) -> None:
        """`spread`: sigma of the logarithm, 0 for none; or measured steps."""
        self._choose = choose
        self._sigma = float(spread) if isinstance(spread, float | int) else 0.0
        measured = [] if isinstance(spread, float | int) else sorted(spread)
        groups = [measured[i : i + ALIKE] for i in range(0, len(measured), ALIKE)]
        if len(groups) > 1 and len(groups[-1]) < ALIKE:
            groups[-2:] = [groups[-2] + groups[-1]]
        self._begins = [group[0].cost_s for group in groups]
        self._groups = [_Factors.of([step.factor for step in group]) for group in groups]

    def __call__(self, cost_s: float = 0.0, steps: int = 1) -> float:
        """Draw the mean factor of so many steps together, each of so many seconds by the cost."""
        alike = _Factors((), 1.0, self._sigma)
        if self._groups:
            alike = self._groups[max(0, bisect_right(self._begins, cost_s) - 1)]
        if alike.factors and steps == 1:
            return self._choose.choice(alike.factors)
        if not alike.sigma:
            return alike.mean
        sigma = alike.sigma / (alike.mean * math.sqrt(steps))
        return alike.mean * math.exp(self._choose.gauss(-sigma * sigma / 2, sigma))


class _Factors(NamedTuple):
    factors: tuple[float, ...]
    mean: float
    sigma: float

    @classmethod
    def of(cls, factors: Sequence[float]) -> _Factors:
        mean = math.fsum(factors) / len(factors)
        return cls(tuple(factors), mean, math.sqrt(math.fsum((f - mean) ** 2 for f in factors) / len(factors)))


@dataclass(frozen=True)
class FixedSeconds:
    """The same for each step: for tests."""

    seconds: float

    def batch(self, chunks: Sequence[Chunk]) -> float:
        """Return it."""
        return self.seconds
