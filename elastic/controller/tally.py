"""The cost of a placement, kept so that changes of consecutive layers are priced at once, for a search."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from itertools import accumulate, pairwise

from elastic.controller.placement import Placement, Places
from elastic.controller.speedup import CostModel


@dataclass(frozen=True, order=True)
class Change:
    """A replica of layers `first` to `last` - 1 comes to a place, or leaves it."""

    first: int
    last: int
    place: str
    adds: bool


class Tally:
    """Sets of places have numbers, so that each is priced once, however many layers have it."""

    def __init__(self, model: CostModel, placement: Placement) -> None:
        self._model = model
        self._sets: list[Places] = []
        self._numbers: dict[Places, int] = {}
        self._work: list[float] = []
        self._traffic: list[float] = []
        self._crossings: dict[tuple[int, int], float] = {}
        self._turned: dict[tuple[int, str, bool], int] = {}
        self.chain = [self._number(places) for places in placement.chain]
        self._sum()

    @property
    def placement(self) -> Placement:
        return Placement(tuple(self._sets[number] for number in self.chain[1:-1]))

    def places(self, layer: int) -> Places:
        return self._sets[self.chain[layer + 1]]

    def edges(self) -> list[int]:
        """Where runs begin, and where the last one ends."""
        inner = [i for i, (a, b) in enumerate(pairwise(self.chain[1:-1]), 1) if a != b]
        return [0, *inner, len(self.chain) - 2]

    def price(self, place: str, *, adds: bool) -> Priced:
        """What changes at one place would cost."""
        return Priced(self, place, adds)

    def cost_with(self, layer: int, place: str) -> float:
        """Of the placement with one more replica."""
        return self.total(*self._sums_with(layer, place))

    def add(self, layer: int, place: str) -> None:
        """One more replica."""
        self.sums = self._sums_with(layer, place)
        self.chain[layer + 1] = self.turned(self.chain[layer + 1], place, True)
        self.cost = self.total(*self.sums)

    def do(self, change: Change) -> None:
        for layer in range(change.first, change.last):
            self.chain[layer + 1] = self.turned(self.chain[layer + 1], change.place, change.adds)
        self._sum()

    def copy(self) -> Tally:
        """Another tally with the same prices, to try things on."""
        other = copy(self)
        other.chain = list(self.chain)
        return other

    def work(self, number: int) -> float:
        return self._work[number]

    def traffic(self, number: int) -> float:
        return self._traffic[number]

    def crossing(self, before: int, after: int) -> float:
        key = before, after
        if key not in self._crossings:
            self._crossings[key] = self._model.crossing(self._sets[before], self._sets[after])
        return self._crossings[key]

    def turned(self, number: int, place: str, adds: bool) -> int:
        """The set with a place more, or less; the same where that changes nothing."""
        key = number, place, adds
        if key not in self._turned:
            own, *others = self._sets[number]
            rest = [other for other in others if other != place]
            with_it = sorted([*rest, place]) if own != place else rest
            self._turned[key] = self._number((own, *(with_it if adds else rest)))
        return self._turned[key]

    def total(self, work: float, traffic: float, crossings: float) -> float:
        return self._model.total(work, traffic, crossings)

    def _number(self, places: Places) -> int:
        if places not in self._numbers:
            self._numbers[places] = len(self._sets)
            self._sets.append(places)
            self._work.append(self._model.work(places))
            self._traffic.append(self._model.traffic(places))
        return self._numbers[places]

    def _sums_with(self, layer: int, place: str) -> tuple[float, float, float]:
        before, old, after = self.chain[layer : layer + 3]
        new = self.turned(old, place, True)
        crossings = self.crossing(before, new) + self.crossing(new, after)
        crossings -= self.crossing(before, old) + self.crossing(old, after)
        work, traffic = self._work[new] - self._work[old], self._traffic[new] - self._traffic[old]
        return self.sums[0] + work, self.sums[1] + traffic, self.sums[2] + crossings

    def _sum(self) -> None:
        inner = self.chain[1:-1]
        self.sums = (
            sum(map(self.work, inner)),
            sum(map(self.traffic, inner)),
            sum(self.crossing(a, b) for a, b in pairwise(self.chain)),
        )
        self.cost = self.total(*self.sums)


class Priced:
    """Any range of layers, with a place more or less, at the price of a few additions."""

    def __init__(self, tally: Tally, place: str, adds: bool) -> None:
        self._tally, self._old = tally, tally.chain
        turned = {number: tally.turned(number, place, adds) for number in set(tally.chain)}
        self._new = [turned[number] for number in tally.chain]
        work = {old: tally.work(new) - tally.work(old) for old, new in turned.items()}
        traffic = {old: tally.traffic(new) - tally.traffic(old) for old, new in turned.items()}
        crossing = tally.crossing
        inner = {
            (a, b): crossing(turned[a], turned[b]) - crossing(a, b) if a != b else 0.0
            for a, b in set(pairwise(tally.chain))
        }
        layers = tally.chain[1:-1]
        self._work = list(accumulate(map(work.__getitem__, layers), initial=0.0))
        self._traffic = list(accumulate(map(traffic.__getitem__, layers), initial=0.0))
        self._inner = list(accumulate(map(inner.__getitem__, pairwise(layers)), initial=0.0))

    def cost(self, first: int, last: int) -> float:
        """Of the placement after the change of layers `first` to `last` - 1."""
        old, new, crossing = self._old, self._new, self._tally.crossing
        edges = crossing(old[first], new[first + 1]) - crossing(old[first], old[first + 1])
        edges += crossing(new[last], old[last + 1]) - crossing(old[last], old[last + 1])
        work, traffic, crossings = self._tally.sums
        return self._tally.total(
            work + self._work[last] - self._work[first],
            traffic + self._traffic[last] - self._traffic[first],
            crossings + edges + self._inner[last - 1] - self._inner[first],
        )
