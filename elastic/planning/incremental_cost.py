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
    """A replica of layers `first` to `last` - 1 comes to a place, or leaves it."""

    cost: float
    """Of the placement with it."""
    first: int
    last: int
    place: str
    adds: bool


class LayerRuns(NamedTuple):
    """Consecutive layers with the same set of places."""

    edges: list[int]
    """Where they begin, and where the last one ends."""
    numbers: list[int]
    """Of their sets."""


Sums = tuple[float, float, float]
"""Work, traffic, crossings."""


class IncrementalCost:
    """Sets of places have numbers, so that each is priced once, however many layers have it."""

    def __init__(self, model: CostModel, placement: Placement) -> None:
        self._model = model
        self.total = model.total
        self._sets: list[Places] = []
        self._numbers: dict[Places, int] = {}
        self.work: list[float] = []
        """Of each set."""
        self.traffic: list[float] = []
        self._crossings: dict[tuple[int, int], float] = {}
        self._turned: dict[tuple[int, str, bool], int] = {}
        self.chain = [self._number(places) for places in placement.chain]
        self._runs: LayerRuns | None = None
        self._sum()

    @property
    def placement(self) -> Placement:
        return Placement(self.layers)

    @property
    def layers(self) -> tuple[Places, ...]:
        """The places of each."""
        return tuple(self._sets[number] for number in self.chain[1:-1])

    def places(self, number: int) -> Places:
        """Of a set."""
        return self._sets[number]

    @property
    def runs(self) -> LayerRuns:
        """Worked out when it is asked for, once for each placement."""
        if self._runs is None:
            layers = self.chain[1:-1]
            edges = [0, *[i for i, (a, b) in enumerate(pairwise(layers), 1) if a != b], len(layers)]
            self._runs = LayerRuns(edges, [layers[first] for first in edges[:-1]])
        return self._runs

    def price(self, place: str, *, adds: bool) -> RangeCosts:
        """What changes at one place would cost."""
        return RangeCosts(self, place, adds)

    def cost_with(self, layer: int, place: str) -> float:
        """Of the placement with one more replica."""
        return self.total(*self._sums_with(layer, place))

    def add(self, layer: int, place: str) -> None:
        """One more replica."""
        self.sums = self._sums_with(layer, place)
        self.chain[layer + 1] = self.turned(self.chain[layer + 1], place, True)
        self._runs = None
        self.cost = self.total(*self.sums)

    def do(self, change: CostChange) -> None:
        for layer in range(change.first, change.last):
            self.chain[layer + 1] = self.turned(self.chain[layer + 1], change.place, change.adds)
        self._runs = None
        self._sum()

    def copy(self) -> IncrementalCost:
        """Another tally with the same prices, to try things on."""
        other = copy(self)
        other.chain = list(self.chain)
        return other

    def crossing(self, before: int, after: int) -> float:
        key = before, after
        found = self._crossings.get(key)
        if found is None:
            found = self._crossings[key] = self._model.crossing(self._sets[before], self._sets[after])
        return found

    def turned(self, number: int, place: str, adds: bool) -> int:
        """The set with a place more, or less; the same where that changes nothing."""
        key = number, place, adds
        found = self._turned.get(key)
        if found is None:
            places = self._sets[number]
            if place != places[0] and (place in places) != adds:
                own, *others = places
                rest = [*others, place] if adds else [other for other in others if other != place]
                places = (own, *sorted(rest))
            found = self._turned[key] = self._number(places)
        return found

    def _number(self, places: Places) -> int:
        found = self._numbers.get(places)
        if found is None:
            found = self._numbers[places] = len(self._sets)
            self._sets.append(places)
            self.work.append(self._model.work(places))
            self.traffic.append(self._model.traffic(places))
        return found

    def _sums_with(self, layer: int, place: str) -> Sums:
        before, old, after = self.chain[layer : layer + 3]
        new = self.turned(old, place, True)
        crossings = self.crossing(before, new) + self.crossing(new, after)
        crossings -= self.crossing(before, old) + self.crossing(old, after)
        work, traffic = self.work[new] - self.work[old], self.traffic[new] - self.traffic[old]
        return self.sums[0] + work, self.sums[1] + traffic, self.sums[2] + crossings

    def _sum(self) -> None:
        edges, numbers = self.runs
        both = [(number, last - first) for number, (first, last) in zip(numbers, pairwise(edges), strict=True)]
        self.sums = (
            sum([self.work[number] * count for number, count in both]),
            sum([self.traffic[number] * count for number, count in both]),
            sum([self.crossing(a, b) for a, b in pairwise([self.chain[0], *numbers, self.chain[-1]])]),
        )
        self.cost = self.total(*self.sums)


class RangeCosts:
    """Any range of layers, with a place more or less, at the price of a few additions: all sums are over runs."""

    def __init__(self, tally: IncrementalCost, place: str, adds: bool) -> None:
        self._tally, self._place, self._adds = tally, place, adds
        self._edges, self._numbers = tally.runs
        self._turned = [tally.turned(number, place, adds) for number in self._numbers]
        self._work = self._gains(tally.work)
        self._traffic = self._gains(tally.traffic)
        changed = [
            tally.crossing(*after) - tally.crossing(*before)
            for before, after in zip(pairwise(self._numbers), pairwise(self._turned), strict=True)
        ]
        self._inner = list(accumulate(changed, initial=0.0))
        """Before each run, between changed runs."""

    def changes(self, ranges: Collection[tuple[int, int]]) -> Iterator[CostChange]:
        """Of layers `first` to `last` - 1, for each of these ranges."""
        begins = {first: self._begin(first) for first in {first for first, _ in ranges}}
        ends = {last: self._end(last) for last in {last for _, last in ranges}}
        total = self._tally.total
        for first, last in ranges:
            work, traffic, crossings = begins[first]
            more_work, more_traffic, more_crossings = ends[last]
            cost = total(work + more_work, traffic + more_traffic, crossings + more_crossings)
            yield CostChange(cost, first, last, self._place, self._adds)

    def _gains(self, prices: Sequence[float]) -> list[tuple[float, float]]:
        """Of each run: all that the runs before it cost more, and what each of its own layers does."""
        each = [prices[new] - prices[old] for old, new in zip(self._numbers, self._turned, strict=True)]
        runs = [gain * (last - first) for gain, (first, last) in zip(each, pairwise(self._edges), strict=True)]
        return list(zip(accumulate(runs, initial=0.0), each, strict=False))

    def _upto(self, gains: Sequence[tuple[float, float]], run: int, spot: int) -> float:
        before, each = gains[run]
        return before + each * (spot - self._edges[run])

    def _begin(self, first: int) -> Sums:
        """All there is now, less what changes before a range that begins here, and more for the crossing into it."""
        run, crossing = bisect_right(self._edges, first) - 1, self._tally.crossing
        old, new = self._numbers[run], self._turned[run]
        if first > self._edges[run]:
            more = crossing(old, new)
        else:
            before = self._numbers[run - 1] if run else self._tally.chain[0]
            more = crossing(before, new) - crossing(before, old)
        work, traffic, crossings = self._tally.sums
        work -= self._upto(self._work, run, first)
        traffic -= self._upto(self._traffic, run, first)
        return work, traffic, crossings - self._inner[run] + more

    def _end(self, last: int) -> Sums:
        """What changes before the end of a range here, and the crossing out of it."""
        run, crossing = bisect_left(self._edges, last) - 1, self._tally.crossing
        old, new = self._numbers[run], self._turned[run]
        if last < self._edges[run + 1]:
            more = crossing(new, old)
        else:
            after = self._numbers[run + 1] if run + 1 < len(self._numbers) else self._tally.chain[-1]
            more = crossing(new, after) - crossing(old, after)
        return self._upto(self._work, run, last), self._upto(self._traffic, run, last), self._inner[run] + more
