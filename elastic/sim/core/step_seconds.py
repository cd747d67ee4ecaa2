"""Seconds of steps: from costs that were fitted to measurements, or from data sheets, with noise."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

ALIKE = 100
"""Of measured steps, so many of the nearest seconds are taken to be alike."""
TOGETHER = 30
"""Steps of a rank that are disturbed as those were which followed each other."""


class MeasuredStep(NamedTuple):
    """A step that was measured."""

    cost_s: float
    """What the cost says."""
    factor: float
    """The seconds that it took, over these."""


@dataclass(frozen=True)
class BehindPrompt:
    """What steps of single tokens take longer behind a prompt, which has put the weights out of a core's caches."""

    first_s: float = 0.0
    """The first of them,"""
    kept: float = 0.0
    """and of that the share that each further one still takes."""

    def more_s(self, steps: int) -> float:
        """Return what a step takes longer that is so many steps behind a prompt; the next one is none."""
        return self.first_s * self.kept**steps


WARM = BehindPrompt()
"""They take no longer."""


StepNoise = Callable[[float, int], float]
"""Returns the mean factor of so many steps together, each of so many seconds by the cost, as `Noise` does."""


class Noise:
    """Factors of the seconds of steps: lognormal around a mean of 1, or drawn from those that were measured.

    A process that waits for its core does so for as long in a short step as in a long one. So factors are those of the
    steps whose seconds were the most alike; and what disturbs a step often disturbs the next, so they come in the order
    in which they were measured, for some steps at a time.
    """

    def __init__(self, spread: float | Sequence[MeasuredStep], choose: random.Random) -> None:
        """`spread`: sigma of the logarithm, 0 for none; or measured steps."""
        self._choose = choose
        self._sigma = float(spread) if isinstance(spread, float | int) else 0.0
        measured = () if isinstance(spread, float | int) else spread
        order = sorted(range(len(measured)), key=lambda number: measured[number].cost_s)
        groups = [order[i : i + ALIKE] for i in range(0, len(order), ALIKE)]
        if len(groups) > 1 and len(groups[-1]) < ALIKE:
            groups[-2:] = [groups[-2] + groups[-1]]
        self._begins = [measured[group[0]].cost_s for group in groups]
        self._groups = [_Factors.of([measured[number].factor for number in sorted(group)]) for group in groups]
        self._at = [0] * len(groups)
        self._left = 0  # steps until others are drawn from

    def __call__(self, cost_s: float = 0.0, steps: int = 1) -> float:
        """Draw the mean factor of so many steps together, each of so many seconds by the cost."""
        alike = _Factors((), 1.0, self._sigma)
        if self._groups:
            number = max(0, bisect_right(self._begins, cost_s) - 1)
            alike = self._groups[number]
            if steps == 1:
                return self._next(number)
        if not alike.sigma:
            return alike.mean
        sigma = alike.sigma / (alike.mean * math.sqrt(steps))
        return alike.mean * math.exp(self._choose.gauss(-sigma * sigma / 2, sigma))

    def _next(self, number: int) -> float:
        """Return the factor behind the one before in a group; now and then from another place in all of them."""
        if not self._left:
            self._left = TOGETHER
            self._at = [self._choose.randrange(len(group.factors)) for group in self._groups]
        self._left -= 1
        factors = self._groups[number].factors
        self._at[number] = (self._at[number] + 1) % len(factors)
        return factors[self._at[number]]


class MeasuredPace:
    """How much of its steps' cost a rank got done at each moment of a real run; between its steps, the mean of all.

    With it a simulated rank is as fast as the real one was then, whatever slowed that down: what its requests saw
    otherwise than real ones is of the schedule, not of the seconds.
    """

    def __init__(self, steps: Sequence[tuple[float, float, float]]) -> None:
        """Take one step or more, in order: when it began and ended, in seconds of the run, and what it costs."""
        mean = math.fsum(cost_s for *_, cost_s in steps) / math.fsum(end_s - begin_s for begin_s, end_s, _ in steps)
        self._at, self._done = [0.0], [0.0]  # cost that was done until a time
        for begin_s, end_s, cost_s in steps:
            self._append(begin_s, mean * (begin_s - self._at[-1]))
            self._append(end_s, cost_s)
        self._append(self._at[-1] + 1.0, mean)  # and so on

    def seconds(self, at_s: float, cost_s: float) -> float:
        """Return how long a step takes that begins at a time."""
        done = _line(self._at, self._done, at_s)
        return _line(self._done, self._at, done + cost_s) - at_s

    def noise(self, clock: Callable[[], float]) -> StepNoise:
        """Return the factors of steps that begin when they are asked for; `clock` says seconds of the run."""
        return lambda cost_s, steps: self.seconds(clock(), steps * cost_s) / (steps * cost_s)

    def _append(self, at_s: float, cost_s: float) -> None:
        if at_s > self._at[-1]:
            self._at.append(at_s)
            self._done.append(self._done[-1] + cost_s)


def _line(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Return y at x on the lines between points with ascending xs; the last one goes on."""
    right = min(bisect_right(xs, x), len(xs) - 1)
    slope = (ys[right] - ys[right - 1]) / (xs[right] - xs[right - 1])
    return ys[right] + slope * (x - xs[right])


class _Factors(NamedTuple):
    factors: tuple[float, ...]
    mean: float
    sigma: float

    @classmethod
    def of(cls, factors: Sequence[float]) -> _Factors:
        mean = math.fsum(factors) / len(factors)
        return cls(tuple(factors), mean, math.sqrt(math.fsum((f - mean) ** 2 for f in factors) / len(factors)))
