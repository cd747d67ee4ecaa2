"""The cost of a placement, kept so that changes of consecutive layers are priced at once, for a search."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from copy import copy
from itertools import accumulate, pairwise
from typing import NamedTuple

from elastic.planning.cost_model import CostModel
from elastic.planning.placement import Placement, Places


class CostChange(NamedTuple):
    """A replica of layers `first` to `last` - 1 that comes to a place, or leaves it."""

    cost: float
    """Of the placement with it."""
    first: int
    last: int
    place: str
    adds: bool


class LayerRuns(NamedTuple):
    """Consecutive layers with the same set of places."""

    edges: list[int]
    """The layers where they begin, and the end of the last one."""
    numbers: list[int]
    """Of their sets."""


Sums = tuple[float, float, float]
"""Work, traffic, crossings."""


class IncrementalCost:
    """The cost of a placement that changes. Sets of places have numbers, so that each is priced once."""

    def __init__(self, model: CostModel, placement: Placement) -> None:
        self._model = model
        self.total = model.total
        self.sets: list[Places] = []
        """By number."""
        self.work: list[float] = []
        """Of each set; `traffic` too."""
        self.traffic: list[float] = []
        self._numbers: dict[Places, int] = {}
        self._crossings: dict[tuple[int, int], float] = {}
        self._turned: dict[tuple[int, str, bool], int] = {}
        self.chain = [self._number(places) for places in placement.chain]
        self._runs: LayerRuns | None = None
        self._sum()

    @property
    def placement(self) -> Placement:
        """The placement as it is now."""
        return Placement(tuple(self.sets[number] for number in self.chain[1:-1]))

    @property
    def runs(self) -> LayerRuns:
        """The runs of the placement, worked out when they are asked for."""
        if self._runs is None:
            layers = self.chain[1:-1]
            edges = [0, *[i for i, (a, b) in enumerate(pairwise(layers), 1) if a != b], len(layers)]
            self._runs = LayerRuns(edges, [layers[first] for first in edges[:-1]])
        return self._runs

    def sums_with(self, layer: int, place: str) -> Sums:
        """Return the sums of the placement with one more replica."""
        before, old, after = self.chain[layer : layer + 3]
        new = self.turned(old, place, True)
        crossings = self.crossing(before, new) + self.crossing(new, after)
        crossings -= self.crossing(before, old) + self.crossing(old, after)
        work, traffic = self.work[new] - self.work[old], self.traffic[new] - self.traffic[old]
        return self.sums[0] + work, self.sums[1] + traffic, self.sums[2] + crossings

    def add(self, layer: int, place: str) -> None:
        """Add one more replica."""
        self.sums = self.sums_with(layer, place)
        self.chain[layer + 1] = self.turned(self.chain[layer + 1], place, True)
        self._runs = None
        self.cost = self.total(*self.sums)

    def apply(self, change: CostChange) -> None:
        """Add or take away the replicas of a change."""
        for layer in range(change.first, change.last):
            self.chain[layer + 1] = self.turned(self.chain[layer + 1], change.place, change.adds)
        self._runs = None
        self._sum()

    def copy(self) -> IncrementalCost:
        """Return another one with the same prices, to try changes on."""
        other = copy(self)
        other.chain = list(self.chain)
        return other

    def crossing(self, before: int, after: int) -> float:
        """Return the cost between two layers with these sets of places, by number."""
        key = before, after
        price = self._crossings.get(key)
        if price is None:
            price = self._crossings[key] = self._model.crossing(self.sets[before], self.sets[after])
        return price

    def turned(self, number: int, place: str, adds: bool) -> int:
        """Return the set with a place more, or less; the same where that changes nothing."""
        key = number, place, adds
        turned = self._turned.get(key)
        if turned is None:
            places = self.sets[number]
            if place != places[0] and (place in places) != adds:
                first, *others = places
                rest = [*others, place] if adds else [other for other in others if other != place]
                places = (first, *sorted(rest))
            turned = self._turned[key] = self._number(places)
        return turned

    def _number(self, places: Places) -> int:
        number = self._numbers.get(places)
        if number is None:
            number = self._numbers[places] = len(self.sets)
            self.sets.append(places)
            self.work.append(self._model.work(places))
            self.traffic.append(self._model.traffic(places))
        return number

    def _sum(self) -> None:
        edges, numbers = self.runs
        counted = [(number, last - first) for number, (first, last) in zip(numbers, pairwise(edges), strict=True)]
        self.sums = (
            sum([self.work[number] * count for number, count in counted]),
            sum([self.traffic[number] * count for number, count in counted]),
            sum([self.crossing(a, b) for a, b in pairwise([self.chain[0], *numbers, self.chain[-1]])]),
        )
        self.cost = self.total(*self.sums)


class RangeCosts:
    """Prices of a place more, or less, for any range of layers: a few additions each, as all sums are over runs."""

    def __init__(self, present: IncrementalCost, place: str, adds: bool) -> None:
        self._present, self._place, self._adds = present, place, adds
        self._edges, self._numbers = present.runs
        self._turned = [present.turned(number, place, adds) for number in self._numbers]
        self._work = self._gains(present.work)
        self._traffic = self._gains(present.traffic)
        changed = [
            present.crossing(*after) - present.crossing(*before)
            for before, after in zip(pairwise(self._numbers), pairwise(self._turned), strict=True)
        ]
        self._inner = list(accumulate(changed, initial=0.0))
        """Before each run, between changed runs."""

    def changes(self, ranges: Collection[tuple[int, int]]) -> Iterator[CostChange]:
        """Price layers `first` to `last` - 1, for each of these ranges."""
        begins = {first: self._begin(first) for first in {first for first, _ in ranges}}
        ends = {last: self._end(last) for last in {last for _, last in ranges}}
        total = self._present.total
        for first, last in ranges:
            work, traffic, crossings = begins[first]
            more_work, more_traffic, more_crossings = ends[last]
            cost = total(work + more_work, traffic + more_traffic, crossings + more_crossings)
            yield CostChange(cost, first, last, self._place, self._adds)

    def _gains(self, prices: Sequence[float]) -> list[tuple[float, float]]:
        """Return for each run what all runs before it cost more, and what each of its own layers does."""
        by_layer = [prices[new] - prices[old] for old, new in zip(self._numbers, self._turned, strict=True)]
        by_run = [gain * (last - first) for gain, (first, last) in zip(by_layer, pairwise(self._edges), strict=True)]
        return list(zip(accumulate(by_run, initial=0.0), by_layer, strict=False))

    def _up_to(self, gains: Sequence[tuple[float, float]], run: int, layer: int) -> float:
        before, by_layer = gains[run]
        return before + by_layer * (layer - self._edges[run])

    def _begin(self, first: int) -> Sums:
        """Return all there is now, less what changes before a range that begins here, plus the crossing into it."""
        run, crossing = bisect_right(self._edges, first) - 1, self._present.crossing
        old, new = self._numbers[run], self._turned[run]
        if first > self._edges[run]:
            more = crossing(old, new)
        else:
            before = self._numbers[run - 1] if run else self._present.chain[0]
            more = crossing(before, new) - crossing(before, old)
        work, traffic, crossings = self._present.sums
        work -= self._up_to(self._work, run, first)
        traffic -= self._up_to(self._traffic, run, first)
        return work, traffic, crossings - self._inner[run] + more

    def _end(self, last: int) -> Sums:
        """Return what changes before the end of a range here, and the crossing out of it."""
        run, crossing = bisect_left(self._edges, last) - 1, self._present.crossing
        old, new = self._numbers[run], self._turned[run]
        if last < self._edges[run + 1]:
            more = crossing(new, old)
        else:
            after = self._numbers[run + 1] if run + 1 < len(self._numbers) else self._present.chain[-1]
            more = crossing(new, after) - crossing(old, after)
        return self._up_to(self._work, run, last), self._up_to(self._traffic, run, last), self._inner[run] + more
