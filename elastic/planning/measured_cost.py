"""The speed-up model in seconds, fitted to measurements of the places at hand.

A layer takes a fixed time and a time for each token of each row, at the speed of its place, and longer the more places
of its device compute beside it; what crosses from place to place takes a latency and a time for each byte. All are
fitted by least squares. (CoCoServe, section 4.1)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heapify, heapreplace

from elastic.errors import ConfigError
from elastic.planning.cost_model import CostModel
from elastic.planning.placement import Places

Points = Sequence[tuple[float, float]]
"""(amount, seconds)."""


@dataclass(frozen=True)
class LinearLatency:
    """Seconds = `fixed_s` + amount · `each_s`; neither is below zero."""

    fixed_s: float
    each_s: float

    def __call__(self, amount: float) -> float:
        return self.fixed_s + amount * self.each_s

    def times(self, factor: float) -> LinearLatency:
        return LinearLatency(factor * self.fixed_s, factor * self.each_s)

    @classmethod
    def fit(cls, points: Points) -> LinearLatency:
        """Least squares of relative errors, with both coefficients at least zero: small amounts count as much as large.

        Raises `ConfigError` for no points, and for seconds that are not above zero.
        """
        if not points or min(seconds for _, seconds in points) <= 0:
            raise ConfigError(
                f"points={list(points)} cannot be fitted; measure two amounts or more, in seconds above 0"
            )
        weights = [seconds**-2 for _, seconds in points]
        mean_x, mean_y = (_mean(values, weights) for values in zip(*points, strict=True))
        spread = _mean([(x - mean_x) ** 2 for x, _ in points], weights)
        slope = _mean([(x - mean_x) * (y - mean_y) for x, y in points], weights) / spread if spread else 0.0
        if slope <= 0:
            return cls(mean_y, 0.0)
        fixed = mean_y - slope * mean_x
        if fixed >= 0:
            return cls(fixed, slope)
        through_origin = _mean([x * y for x, y in points], weights) / _mean([x * x for x, _ in points], weights)
        return cls(0.0, through_origin)


@dataclass(frozen=True)
class Calibration:
    """What was measured."""

    layers: Mapping[str, LinearLatency] = field(hash=False)
    """Place -> seconds of one decoder layer for so many tokens of all rows together."""
    links: Mapping[tuple[str, str], LinearLatency] = field(default_factory=dict, hash=False)
    """(from, to) -> seconds for so many bytes; between places not named here nothing is copied."""
    beside: Mapping[str, Sequence[LinearLatency]] = field(default_factory=dict, hash=False)
    """Device -> seconds of one layer, as in `layers`, while two, three, ... places of it compute at once. Places of a
    device that is not named here do not slow each other."""
    handing_s: float = 0.0
    """To hand one layer's inputs to one replica on another device; what was measured beside includes it."""

    def link(self, here: str, there: str) -> LinearLatency:
        return self.links.get((here, there)) or self.links.get((there, here)) or LinearLatency(0.0, 0.0)

    def layer(self, place: str, computing: int) -> LinearLatency:
        """Of one layer while so many places of the device compute. Raises `ConfigError` for an unknown place."""
        if place not in self.layers:
            raise ConfigError(f"place {place!r} was not measured; calibrated are {sorted(self.layers)}")
        beside = self.beside.get(_device(place), ())
        if computing == 1 or not beside:
            return self.layers[place]
        measured = min(computing, len(beside) + 1)
        return beside[measured - 2].times(computing / measured)  # more than were measured: they take turns


def fit(
    layers: Mapping[str, Points],
    links: Mapping[tuple[str, str], Points] | None = None,
    beside: Mapping[str, Sequence[Points]] | None = None,
    handing_s: float = 0.0,
) -> Calibration:
    """From measurements: of layers (tokens of all rows, seconds), alone and side by side; links (bytes, seconds)."""
    return Calibration(
        {place: LinearLatency.fit(points) for place, points in layers.items()},
        {pair: LinearLatency.fit(points) for pair, points in (links or {}).items()},
        {device: [LinearLatency.fit(points) for points in more] for device, more in (beside or {}).items()},
        handing_s,
    )


class MeasuredCostModel:
    """Seconds of a forward pass of `rows` sequences with `tokens` new tokens each, whose hidden states have
    `token_bytes` bytes for a token. Whole rows are split so that the places end as nearly together as they can; each
    place has one at least, unless there are fewer rows than places.
    """

    def __init__(self, calibration: Calibration, rows: int, tokens: int, token_bytes: int) -> None:
        self.calibration = calibration
        self.rows = rows
        self.tokens = tokens
        self.token_bytes = token_bytes
        self._known: dict[Places, _Shares] = {}
        self._lines: dict[tuple[str, int], LinearLatency] = {}
        self._ways: dict[tuple[str, str], LinearLatency] = {}

    def split(self, places: Places) -> tuple[int, ...]:
        """Rows for each of a layer's places; some may get none if there are fewer rows than places."""
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
        apart = before[0] != after[0] and _device(before[0]) != _device(after[0])
        whole = self._way(before[0], after[0])(self.rows) if apart else 0.0
        return self._shares(before).apart_s + whole + self._shares(after).apart_s

    def total(self, work: float, traffic: float, crossings: float) -> float:
        return work + crossings

    def _shares(self, places: Places) -> _Shares:
        """Worked out once for each set of places."""
        found = self._known.get(places)
        if found is None:
            found = self._known[places] = self._share_out(places)
        return found

    def _share_out(self, places: Places) -> _Shares:
        devices = list(map(_device, places))
        lines = [self._line(place, devices.count(device)) for place, device in zip(places, devices, strict=True)]
        rows = split_rows(self.rows, lines, least=1 if len(places) <= self.rows else 0)
        each = set(devices)
        if len(each) == len(devices):
            work_s = max([line(n) for line, n in zip(lines, rows, strict=True) if n], default=0.0)
        else:
            computing = [(place, n) for place, n in zip(places, rows, strict=True) if n]
            work_s = max(self._side_by_side([p for p in computing if _device(p[0]) == device]) for device in each)
        away = [self._way(places[0], place)(n) for place, n in zip(places[1:], rows[1:], strict=True) if n]
        elsewhere = sum(device != devices[0] for device, n in zip(devices, rows, strict=True) if n)
        return _Shares(rows, work_s + elsewhere * self.calibration.handing_s, math.fsum(away))

    def _side_by_side(self, computing: Sequence[tuple[str, int]]) -> float:
        """Until all places of one device have their rows; the fewer still compute, the faster they are."""
        if len({n for _, n in computing}) == 1:  # they end together
            return max(self._line(place, len(computing))(n) for place, n in computing)
        left = sorted(((1.0, place, n) for place, n in computing), key=lambda one: one[2])
        seconds = 0.0
        while left:
            needed = [share * self._line(place, len(left))(n) for share, place, n in left]
            least = min(needed)
            seconds += least
            left = [
                (share * (1 - least / its), place, n)
                for its, (share, place, n) in zip(needed, left, strict=True)
                if its > least
            ]
        return seconds

    def _way(self, here: str, there: str) -> LinearLatency:
        """Seconds for so many rows."""
        found = self._ways.get((here, there))
        if found is None:
            line = self.calibration.link(here, there)
            found = self._ways[here, there] = LinearLatency(line.fixed_s, line.each_s * self.tokens * self.token_bytes)
        return found

    def _line(self, place: str, computing: int) -> LinearLatency:
        """Seconds for so many rows."""
        found = self._lines.get((place, computing))
        if found is None:
            line = self.calibration.layer(place, computing)
            found = self._lines[place, computing] = LinearLatency(line.fixed_s, line.each_s * self.tokens)
        return found


class WeightedCost:
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


def split_rows(rows: int, lines: Sequence[LinearLatency], least: int = 0) -> tuple[int, ...]:
    """Whole rows for places of these speeds, `least` each, so that the last one to end ends as early as it can."""
    each = [line.each_s for line in lines]
    fixed = [line.fixed_s + least * line.each_s for line in lines]
    given, left = [0] * len(lines), rows - least * len(lines)
    together = _meeting(left, fixed, each)
    if min(each) <= 0:
        flat = min([i for i, slope in enumerate(each) if slope <= 0], key=lambda i: fixed[i])
        if fixed[flat] <= together:  # as many rows as there are, in the same time
            given[flat] = left
            return tuple([least + n for n in given])
    for i, slope in enumerate(each):
        if slope > 0 and together > fixed[i]:
            given[i] = min(left, math.floor((together - fixed[i]) / slope))
            left -= given[i]
    ends = [(fixed[i] + (given[i] + 1) * slope, i) for i, slope in enumerate(each)]
    heapify(ends)
    for _ in range(left):
        end, first = ends[0]
        given[first] += 1
        heapreplace(ends, (end + each[first], first))
    return tuple([least + n for n in given])


def _meeting(rows: int, fixed: Sequence[float], each: Sequence[float]) -> float:
    """When all would end together, could rows be divided; those that would begin later get none."""
    speed = filled = 0.0
    end = math.inf
    for begin, slope in sorted(zip(fixed, each, strict=True)):
        if begin >= end or slope <= 0:
            break
        speed += 1 / slope
        filled += begin / slope
        end = (rows + filled) / speed
    return end


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return math.fsum(v * w for v, w in zip(values, weights, strict=True)) / math.fsum(weights)


@cache
def _device(place: str) -> str:
    return place.partition("#")[0]
