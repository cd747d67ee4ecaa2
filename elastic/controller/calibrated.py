"""The speed-up model in seconds, fitted to measurements of the places at hand.

A layer takes a fixed time and a time for each token of each row, at the speed of its place; what crosses from place to
place takes a latency and a time for each byte. All four are fitted by least squares. (CoCoServe, section 4.1)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from elastic.controller.placement import Places
from elastic.controller.speedup import CostModel
from elastic.errors import ConfigError

Points = Sequence[tuple[float, float]]
"""(amount, seconds)."""


@dataclass(frozen=True)
class Line:
    """Seconds = `fixed_s` + amount · `each_s`; neither is below zero."""

    fixed_s: float
    each_s: float

    def __call__(self, amount: float) -> float:
        return self.fixed_s + amount * self.each_s

    @classmethod
    def fit(cls, points: Points) -> Line:
        """Least squares with both coefficients at least zero. Raises `ConfigError` for no points."""
        if not points:
            raise ConfigError("points=[] cannot be fitted; measure one amount at least, better two or three")
        n, x, y = len(points), [p[0] for p in points], [p[1] for p in points]
        mean_x, mean_y = math.fsum(x) / n, math.fsum(y) / n
        spread = math.fsum((a - mean_x) ** 2 for a in x)
        slope = math.fsum((a - mean_x) * (b - mean_y) for a, b in points) / spread if spread else 0.0
        if slope <= 0 or not spread:
            return cls(max(0.0, mean_y), 0.0)
        fixed = mean_y - slope * mean_x
        if fixed >= 0:
            return cls(fixed, slope)
        return cls(0.0, math.fsum(a * b for a, b in points) / math.fsum(a * a for a in x))  # through the origin


@dataclass(frozen=True)
class Calibration:
    """What was measured."""

    layers: Mapping[str, Line] = field(hash=False)
    """Place -> seconds of one decoder layer for so many tokens of all rows together."""
    links: Mapping[tuple[str, str], Line] = field(default_factory=dict, hash=False)
    """(from, to) -> seconds for so many bytes; between places not named here nothing is copied."""
    beside: float = 1.0
    """How many times longer a layer takes while another place of the same device computes too."""

    def link(self, here: str, there: str) -> Line:
        return self.links.get((here, there)) or self.links.get((there, here)) or Line(0.0, 0.0)


def fit(
    layers: Mapping[str, Points], links: Mapping[tuple[str, str], Points] | None = None, beside: float = 1.0
) -> Calibration:
    """From measurements: of layers (tokens of all rows, seconds), of links (bytes, seconds)."""
    fitted = {pair: Line.fit(points) for pair, points in (links or {}).items()}
    return Calibration({place: Line.fit(points) for place, points in layers.items()}, fitted, max(1.0, beside))


class Calibrated:
    """Seconds of a forward pass of `rows` sequences with `tokens` new tokens each, whose hidden states have
    `row_bytes` bytes for a token. Whole rows are split so that the places end as nearly together as they can.
    """

    def __init__(self, calibration: Calibration, rows: int, tokens: int, token_bytes: int) -> None:
        self.calibration = calibration
        self.rows = rows
        self.tokens = tokens
        self.token_bytes = token_bytes
        self._known: dict[Places, _Shares] = {}
        self._scaled: dict[tuple[str, float], Line] = {}

    def split(self, places: Places) -> tuple[int, ...]:
        """Rows for each of a layer's places; some may get none."""
        return self._shares(places).rows

    def work(self, places: Places) -> float:
        """Until the slowest place has its rows."""
        return self._shares(places).work_s

    def traffic(self, places: Places) -> float:
        """Nothing: within a run no row travels."""
        return 0.0

    def crossing(self, before: Places, after: Places) -> float:
        """Rows come together, go to the next layer's own place, and go apart; those that stay cost nothing."""
        if before == after:
            return 0.0
        whole = self._seconds(before[0], after[0], self.rows) if _device(before[0]) != _device(after[0]) else 0.0
        return self._shares(before).apart_s + whole + self._shares(after).apart_s

    def total(self, work: float, traffic: float, crossings: float) -> float:
        return work + crossings

    def _shares(self, places: Places) -> _Shares:
        """Worked out once for each set of places."""
        if places not in self._known:
            lines = self._lines(places)
            rows = split_rows(self.rows, lines)
            work_s = max((line(n) for line, n in zip(lines, rows, strict=True) if n), default=0.0)
            away = zip(places[1:], rows[1:], strict=True)
            self._known[places] = _Shares(
                rows, work_s, math.fsum(self._seconds(places[0], place, n) for place, n in away if n)
            )
        return self._known[places]

    def _seconds(self, here: str, there: str, rows: int) -> float:
        return self.calibration.link(here, there)(rows * self.tokens * self.token_bytes)

    def _lines(self, places: Places) -> list[Line]:
        """Seconds for so many rows at each place."""
        if self.calibration.beside == 1.0:
            return [self._line(place, 1.0) for place in places]
        beside = Counter(map(_device, places))
        return [self._line(place, self.calibration.beside if beside[_device(place)] > 1 else 1.0) for place in places]

    def _line(self, place: str, times: float) -> Line:
        if (place, times) not in self._scaled:
            line = self.calibration.layers.get(place)
            if line is None:
                raise ConfigError(f"place {place!r} was not measured; calibrated are {sorted(self.calibration.layers)}")
            self._scaled[place, times] = Line(times * line.fixed_s, times * line.each_s * self.tokens)
        return self._scaled[place, times]


class Weighted:
    """Several forward passes of a kind, such as one of a prompt and many of one token: (how many, model)."""

    def __init__(self, *parts: tuple[float, CostModel]) -> None:
        self._parts = parts

    def work(self, places: Places) -> float:
        return math.fsum(times * model.work(places) for times, model in self._parts)

    def traffic(self, places: Places) -> float:
        return math.fsum(times * model.traffic(places) for times, model in self._parts)

    def crossing(self, before: Places, after: Places) -> float:
        return math.fsum(times * model.crossing(before, after) for times, model in self._parts)

    def total(self, work: float, traffic: float, crossings: float) -> float:
        return work + traffic + crossings


@dataclass(frozen=True)
class _Shares:
    """Of one set of places."""

    rows: tuple[int, ...]
    work_s: float
    apart_s: float
    """To send rows to the replicas, or to have them back."""


def split_rows(rows: int, lines: Sequence[Line]) -> tuple[int, ...]:
    """Whole rows for places of these speeds, so that the last one to end ends as early as it can."""
    given = [0] * len(lines)
    together = _meeting(rows, lines)
    flat = min((i for i, line in enumerate(lines) if line.each_s <= 0), key=lambda i: lines[i].fixed_s, default=None)
    if flat is not None and lines[flat].fixed_s <= together:  # as many rows as there are, in the same time
        given[flat] = rows
        return tuple(given)
    for i, line in enumerate(lines):
        if line.each_s > 0 and together > line.fixed_s:
            given[i] = min(rows - sum(given), math.floor((together - line.fixed_s) / line.each_s))
    for _ in range(rows - sum(given)):
        first = min(range(len(lines)), key=lambda i: lines[i](given[i] + 1))
        given[first] += 1
    return tuple(given)


def _meeting(rows: int, lines: Sequence[Line]) -> float:
    """When all would end together, could rows be divided; those that would begin later get none."""
    speed = filled = 0.0
    end = math.inf
    for line in sorted(lines, key=lambda line: line.fixed_s):
        if line.fixed_s >= end or line.each_s <= 0:
            break
        speed += 1 / line.each_s
        filled += line.fixed_s / line.each_s
        end = (rows + filled) / speed
    return end


@cache
def _device(place: str) -> str:
    return place.partition("#")[0]
