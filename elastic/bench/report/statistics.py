"""Statistics: means, spreads and quantiles of samples, and slopes over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which `share` of an ascending sample lies, linear between neighbours, as in numpy."""
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def described(name: str, unit: str, sample: Sequence[float], factor: float = 1.0) -> dict[str, float | None]:
    """Return `mean_NAME_UNIT`, `median_`, `std_` (of the population), `p95_`, `p99_`, `max_`; None without a sample."""
    ordered = sorted(value * factor for value in sample)
    values: dict[str, float | None] = dict.fromkeys(("mean", "median", "std", "p95", "p99", "max"))
    if ordered:
        values = {
            "mean": fmean(ordered),
            "median": quantile(ordered, 0.5),
            "std": pstdev(ordered),
            "p95": quantile(ordered, 0.95),
            "p99": quantile(ordered, 0.99),
            "max": ordered[-1],
        }
    return {f"{key}_{name}_{unit}": value for key, value in values.items()}


@dataclass(frozen=True)
class Slope:
    """A straight line through points, by least squares."""

    per_s: float
    t: float
    """The slope over its standard error; infinite where the points lie on a line that rises."""


def slope(times: Sequence[float], values: Sequence[float]) -> Slope:
    """Fit a line to three points or more at different times."""
    n, middle, level = len(times), fmean(times), fmean(values)
    spread = sum((t - middle) ** 2 for t in times)
    rise = sum((t - middle) * (v - level) for t, v in zip(times, values, strict=True)) / spread
    rest = sum((v - level - rise * (t - middle)) ** 2 for t, v in zip(times, values, strict=True))
    error = math.sqrt(rest / (n - 2) / spread)
    if error == 0:
        return Slope(rise, math.copysign(math.inf, rise) if rise else 0.0)
    return Slope(rise, rise / error)
