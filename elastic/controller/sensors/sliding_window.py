"""Averages and quantiles of the last seconds: a ring of time buckets, each a small histogram. O(1) per observation."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from itertools import accumulate

from elastic.controller.snapshot import Quantiles

BUCKETS = 30
BUCKET_S = 1.0
"""Length of a bucket: a window covers the present bucket of time and the 29 before it."""
SMALLEST_S = 1e-5
LARGEST_S = 1e4
RATIO = 1.1
"""Of the bounds of a bin. Its middle stands for a quantile, which is off by sqrt(RATIO) - 1 at most, 4.9 %; it is 0
below `SMALLEST_S`, and `LARGEST_S` at most."""
EMA_WEIGHT = 0.25
_BINS = math.ceil(math.log(LARGEST_S / SMALLEST_S) / math.log(RATIO))


def moving_average(average: float, value: float, weight: float) -> float:
    """Return an exponential moving average after one more value, which has this weight."""
    return average + weight * (value - average)


class TimeBuckets:
    """The buckets of time that a window still covers, the present one last."""

    _head: int | None = None

    def advance(self, at_s: float) -> int:
        """Count the buckets that have passed since the last call, at most all; time that runs backwards passes none."""
        now = math.floor(at_s / BUCKET_S)
        head = now if self._head is None else self._head
        self._head = max(now, head)
        return min(self._head - head, BUCKETS)


class WindowSum:
    """The sum of what was added within the window."""

    def __init__(self) -> None:
        self._ring = TimeBuckets()
        self._sums = deque([0] * BUCKETS, maxlen=BUCKETS)
        self._total = 0

    def add(self, amount: int, at_s: float) -> None:
        """Add an amount, at a time in seconds."""
        self._total = self.read(at_s) + amount
        self._sums[-1] += amount

    def read(self, at_s: float) -> int:
        """Return the sum, as of a time in seconds."""
        for _ in range(self._ring.advance(at_s)):
            self._total -= self._sums[0]
            self._sums.append(0)
        return self._total


class SlidingWindow:
    """Seconds that were observed within the window, and their quantiles."""

    def __init__(self) -> None:
        self._ring = TimeBuckets()
        self._bins: deque[Counter[int]] = deque((Counter() for _ in range(BUCKETS)), maxlen=BUCKETS)
        self._sums = deque([0.0] * BUCKETS, maxlen=BUCKETS)
        self._totals = [0] * (_BINS + 1)  # by bin, over all buckets
        self._ema: float | None = None
        self._quantiles: Quantiles | None = Quantiles()  # None: something has changed since they were read

    def add(self, seconds: float, at_s: float, times: int = 1) -> None:
        """Observe a duration, below zero as 0, at a time in seconds, so many times."""
        self._advance(at_s)
        seconds, index = max(0.0, seconds), 0
        if seconds > SMALLEST_S:
            index = min(_BINS, 1 + int(math.log(seconds / SMALLEST_S) / math.log(RATIO)))
        self._bins[-1][index] += times
        self._totals[index] += times
        self._sums[-1] += seconds * times
        self._quantiles = None
        self._ema = seconds if self._ema is None else moving_average(self._ema, seconds, 1 - (1 - EMA_WEIGHT) ** times)

    def read(self, at_s: float) -> Quantiles:
        """Return the quantiles, by nearest rank, as of a time in seconds."""
        self._advance(at_s)
        if self._quantiles is None:
            cumulated = list(accumulate(self._totals))
            count = cumulated[-1]
            bins = [bisect_left(cumulated, math.ceil(q * count / 100)) for q in (50, 95, 99)]
            p50, p95, p99 = (SMALLEST_S * RATIO ** (index - 0.5) if index else 0.0 for index in bins)
            mean = math.fsum(self._sums) / max(1, count)
            self._quantiles = Quantiles(count, mean, p50, p95, p99, self._ema) if count else Quantiles()
        return self._quantiles

    def _advance(self, at_s: float) -> None:
        """Forget the buckets that the window covers no more."""
        for _ in range(self._ring.advance(at_s)):
            for index, count in self._bins[0].items():
                self._totals[index] -= count
                self._quantiles = None
            self._bins.append(Counter())
            self._sums.append(0.0)
