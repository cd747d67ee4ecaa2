"""Quantiles of any number of values in little memory."""

from __future__ import annotations

import math

ACCURACY = 0.005
"""How far a quantile may be off, relative to itself."""
_LOG_RATIO = math.log((1 + ACCURACY) / (1 - ACCURACY))
"""Of the bounds of a bucket."""
_MIDDLE = 2 / (1 + math.exp(_LOG_RATIO))
"""Of a bucket, relative to its upper bound."""


class QuantileSketch:
    """Counts of values above 0 in buckets whose bounds grow by the same factor; what is not above 0 counts as 0."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.most = 0.0
        self._zeros = 0
        self._buckets: dict[int, int] = {}

    def add(self, value: float) -> None:
        """Count a value."""
        self.count += 1
        self.total += value
        self.most = max(self.most, value)
        if value <= 0:
            self._zeros += 1
            return
        bucket = math.ceil(math.log(value) / _LOG_RATIO)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

    @property
    def mean(self) -> float:
        """The mean of all values; 0.0 without one."""
        return self.total / self.count if self.count else 0.0

    def read(self, *shares: float) -> list[float]:
        """Return the values below which these ascending shares of all lie; 0.0 without one."""
        quantiles: list[float] = []
        below = self._zeros
        buckets = iter(sorted(self._buckets.items()))
        value = 0.0
        for share in shares:
            while below <= share * (self.count - 1) and (bucket := next(buckets, None)) is not None:
                value = math.exp(bucket[0] * _LOG_RATIO) * _MIDDLE
                below += bucket[1]
            quantiles.append(value)
        return quantiles

    def described(self) -> dict[str, float]:
        """Return the mean, the quantiles that are told of latencies, and the most."""
        p50, p95, p99 = self.read(0.5, 0.95, 0.99)
        return {"mean": self.mean, "p50": p50, "p95": p95, "p99": p99, "max": self.most}
