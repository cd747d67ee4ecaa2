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
    """Seconds of an amount: `fixed_s` + amount · `each_s`; neither is below zero."""

    fixed_s: float
    each_s: float

    def __call__(self, amount: float) -> float:
        return self.fixed_s + amount * self.each_s

    def times(self, factor: float) -> LinearLatency:
        """Return so many times these seconds, for any amount."""
        return LinearLatency(factor * self.fixed_s, factor * self.each_s)

    @classmethod
    def fit(cls, points: Points) -> LinearLatency:
        """Fit by least squares of relative errors, coefficients at least zero: small amounts count as much as large.

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
    """Measured seconds of layers and links."""

    layers: Mapping[str, LinearLatency] = field(hash=False)
    """Place -> seconds of one decoder layer for so many tokens of all rows together."""
    links: Mapping[tuple[str, str], LinearLatency] = field(default_factory=dict, hash=False)
    """(from, to) -> seconds for so many bytes; between places not named here nothing is copied."""
    beside: Mapping[str, Sequence[LinearLatency]] = field(default_factory=dict, hash=False)
    """Device -> seconds of one layer, as in `layers`, while two, three, ... places of it compute at once. Places of a
    device that is not named here do not slow each other."""
    handing_s: float = 0.0
    """To hand one layer's inputs to one replica on another device; what was measured beside includes it."""

    def link(self, source: str, target: str) -> LinearLatency:
        """Return the seconds for so many bytes between two places, either way."""
        return self.links.get((source, target)) or self.links.get((target, source)) or LinearLatency(0.0, 0.0)

    def layer(self, place: str, computing: int) -> LinearLatency:
        """Return the seconds of one layer while so many places of the device compute.

        Raises `ConfigError` for an unknown place.
        """
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
    """Fit measurements: of layers (tokens of all rows, seconds), alone and side by side; of links (bytes, seconds)."""
    return Calibration(
        {place: LinearLatency.fit(points) for place, points in layers.items()},
        {pair: LinearLatency.fit(points) for pair, points in (links or {}).items()},
        {device: [LinearLatency.fit(points) for points in more] for device, more in (beside or {}).items()},
        handing_s,
    )


class MeasuredCostModel(CostModel):
    """Seconds of a forward pass of `rows` sequences with `tokens` new tokens each.

    Their hidden states have `token_bytes` bytes for a token. Whole rows are split so that the places end as nearly
    together as they can; each place has one at least, unless there are fewer rows than places.
    """

    def __init__(self, calibration: Calibration, rows: int, tokens: int, token_bytes: int) -> None:
        self.calibration = calibration
        self.rows = rows
        self.tokens = tokens
        self.token_bytes = token_bytes
        self.split = cache(self._split)
        """Splits a layer's rows between a set of places."""
        self._line = cache(self._row_line)
        self._link = cache(self._row_link)

    def work(self, places: Places) -> float:
        """Return the seconds until the slowest place has computed its rows; within a run none are sent."""
        return self.split(places).work_s

    def crossing(self, before: Places, after: Places) -> float:
        """Return the seconds to join rows, send them to the next layer's own place and split them again.

        Rows that stay cost nothing.
        """
        if before == after:
            return 0.0
        apart = before[0] != after[0] and _device(before[0]) != _device(after[0])
        whole = self._link(before[0], after[0])(self.rows) if apart else 0.0
        return self.split(before).scatter_s + whole + self.split(after).scatter_s

    def _split(self, places: Places) -> LayerSplit:
        devices = list(map(_device, places))
        lines = [self._line(place, devices.count(device)) for place, device in zip(places, devices, strict=True)]
        rows = split_rows(self.rows, lines, least=1 if len(places) <= self.rows else 0)
        if len(set(devices)) == len(devices):
            work_s = max([line(n) for line, n in zip(lines, rows, strict=True) if n], default=0.0)
        else:
            computing = [(place, n) for place, n in zip(places, rows, strict=True) if n]
            work_s = max(self._side_by_side([p for p in computing if _device(p[0]) == d]) for d in set(devices))
        sent_s = [self._link(places[0], place)(n) for place, n in zip(places[1:], rows[1:], strict=True) if n]
        elsewhere = sum(device != devices[0] for device, n in zip(devices, rows, strict=True) if n)
        return LayerSplit(rows, work_s + elsewhere * self.calibration.handing_s, math.fsum(sent_s))

    def _side_by_side(self, computing: Sequence[tuple[str, int]]) -> float:
        """Return the seconds until all (place, rows) of one device are done; the fewer compute, the faster they are."""
        if len({n for _, n in computing}) == 1:  # they end together
            return max(self._line(place, len(computing))(n) for place, n in computing)
        unfinished = sorted(((1.0, place, n) for place, n in computing), key=lambda work: work[2])
        seconds = 0.0
        while unfinished:
            needed = [share * self._line(place, len(unfinished))(n) for share, place, n in unfinished]
            least = min(needed)
            seconds += least
            unfinished = [
                (share * (1 - least / need), place, n)
                for need, (share, place, n) in zip(needed, unfinished, strict=True)
                if need > least
            ]
        return seconds

    def _row_link(self, source: str, target: str) -> LinearLatency:
        """Return the seconds to send so many rows."""
        link = self.calibration.link(source, target)
        return LinearLatency(link.fixed_s, link.each_s * self.tokens * self.token_bytes)

    def _row_line(self, place: str, computing: int) -> LinearLatency:
        """Return the seconds to compute so many rows."""
        layer = self.calibration.layer(place, computing)
        return LinearLatency(layer.fixed_s, layer.each_s * self.tokens)


@dataclass(frozen=True)
class WeightedCost(CostModel):
    """Several forward passes of a kind, such as one of a prompt and many of one token."""

    parts: tuple[tuple[float, CostModel], ...]
    """(how many, model)."""

    def work(self, places: Places) -> float:
        """Return the cost of computing one layer in all passes."""
        return math.fsum(times * model.work(places) for times, model in self.parts)

    def traffic(self, places: Places) -> float:
        """Return the cost of bringing a layer's rows to its places in all passes."""
        return math.fsum(times * model.traffic(places) for times, model in self.parts)

    def crossing(self, before: Places, after: Places) -> float:
        """Return the cost between two layers in all passes."""
        return math.fsum(times * model.crossing(before, after) for times, model in self.parts)


@dataclass(frozen=True)
class LayerSplit:
    """The rows of a layer at one set of places, and their seconds."""

    rows: tuple[int, ...]
    """Of each place; some may get none if there are fewer rows than places."""
    work_s: float
    scatter_s: float
    """To send rows to the replicas, or to have them back."""


def split_rows(rows: int, lines: Sequence[LinearLatency], least: int = 0) -> tuple[int, ...]:
    """Split whole rows between places of these speeds, `least` each, so that the last place ends as early as it can."""
    row_s = [line.each_s for line in lines]
    fixed_s = [line.fixed_s + least * line.each_s for line in lines]
    given, remaining = [0] * len(lines), rows - least * len(lines)
    together_s = _common_end(remaining, fixed_s, row_s)
    if min(row_s) <= 0:
        flat = min([i for i, slope in enumerate(row_s) if slope <= 0], key=lambda i: fixed_s[i])
        if fixed_s[flat] <= together_s:  # as many rows as there are, in the same time
            given[flat] = remaining
            return tuple([least + n for n in given])
    for i, slope in enumerate(row_s):
        if slope > 0 and together_s > fixed_s[i]:
            given[i] = min(remaining, math.floor((together_s - fixed_s[i]) / slope))
            remaining -= given[i]
    ends = [(fixed_s[i] + (given[i] + 1) * slope, i) for i, slope in enumerate(row_s)]
    heapify(ends)
    for _ in range(remaining):
        end, first = ends[0]
        given[first] += 1
        heapreplace(ends, (end + row_s[first], first))
    return tuple([least + n for n in given])


def _common_end(rows: int, fixed_s: Sequence[float], row_s: Sequence[float]) -> float:
    """Return when all would end together, could rows be divided; places that would begin later get none."""
    speed = filled = 0.0
    end = math.inf
    for begin, slope in sorted(zip(fixed_s, row_s, strict=True)):
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
