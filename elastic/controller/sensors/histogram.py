"""Cumulative histograms of times, as metrics exporters want them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

BOUNDS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    25.0,
    50.0,
    100.0,
    250.0,
    1000.0,
)


@dataclass(frozen=True)
class Histogram:
    """Of all observations since the start."""

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    """For each bound, how many observations were not above it."""
    count: int
    sum_s: float


class Histogramming:
    """Counts observations into a `Histogram`."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    def read(self) -> Histogram:
        *counts, count = accumulate(self._counts)
        return Histogram(BOUNDS_S, tuple(counts), count, self._sum_s)
