"""A better planner of replicas: whole runs of layers at a time, and back again. It begins where algorithm 1 ends.

Algorithm 1 adds one layer after another, and stops where the first of a run does not pay: rows that go apart and come
together for one layer often cost more than they gain, for ten layers they do not. So every range of layers is
priced for a place, added or taken away, and the best one is done, until none gains anything.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, permutations

from elastic.controller.placement import Need, Placement, PlaceSize
from elastic.controller.scale_up import GAIN, eligible, scale_up
from elastic.controller.speedup import CostModel, speedup
from elastic.controller.tally import Change, Tally

MOST_SWEEPS = 3
FEW_RANGES = 32
"""Layers up to which every range is looked at; of more, those that begin or end where runs do or room ends."""
SMALL = 48
"""Layers times places up to which places are tried in every order, and changes that gain nothing by themselves too."""
KICKS = 64
"""Of these changes, the cheapest."""


def plan_up(
    placement: Placement, needs: Sequence[Need], places: Sequence[PlaceSize], model: CostModel, t_up: float = 0.2
) -> Placement:
    """The cheapest placement found: at least as good as that of algorithm 1, and within the same margins.

    Replicas that are there already stay. `needs` are of all layers.
    """
    search = _Search(placement, needs, eligible(places, t_up))
    found = [Tally(model, scale_up(placement, needs, places, model, t_up))]
    found += [search.improved(Tally(model, placement), order) for order in search.orders()]
    if len(needs) * len(search.places) <= SMALL:
        found.append(search.improved(found[0].copy(), search.places))
        found.append(search.kicked(_cheapest(found)))
    return _cheapest(found).placement


def _cheapest(tallies: Sequence[Tally]) -> Tally:
    return min(tallies, key=lambda tally: tally.cost)


@dataclass(frozen=True)
class Instance:
    """A model that shares places with others."""

    placement: Placement
    needs: tuple[Need, ...]
    model: CostModel
    places: tuple[str, ...] = ()
    """Those that it may use; (): all."""

    def offered(self, rooms: Iterable[PlaceSize], parts: int) -> list[PlaceSize]:
        """One of so many equal parts of each room that it may use."""
        return [_part(room, parts) for room in rooms if not self.places or room.name in self.places]


def plan_together(
    instances: Mapping[str, Instance], places: Sequence[PlaceSize], t_up: float = 0.2
) -> dict[str, Placement]:
    """Placements of several models that lend each other places, by instance.

    First each may have an equal part of every room, the slowest (by S) first; then each is planned again with all that
    the others leave.
    Bytes and compute that one takes, the next does not have.
    """
    found = {name: instance.placement for name, instance in instances.items()}
    rooms = {place.name: place for place in places}
    for parts in (len(instances), 1):
        for name in sorted(found, key=lambda name: (speedup(instances[name].model, found[name]), name)):
            one = instances[name]
            _take(rooms, one, found[name], -1)
            offered = one.offered(rooms.values(), parts)
            found[name] = plan_up(one.placement, one.needs, offered, one.model, t_up)
            _take(rooms, one, found[name], 1)
    return found


def _take(rooms: dict[str, PlaceSize], one: Instance, planned: Placement, times: int) -> None:
    """What was planned for an instance leaves the rooms, or with -1 comes back."""
    pairs = enumerate(zip(one.placement.layers, planned.layers, strict=True))
    for place, layer in [(place, i) for i, (old, new) in pairs for place in new if place not in old]:
        rooms[place] = rooms[place].having(one.needs[layer], times)


def _part(room: PlaceSize, parts: int) -> PlaceSize:
    """A place that offers one of so many equal parts of its room."""
    free = room.free_bytes - room.room_bytes + room.room_bytes // parts
    idle = room.idle - room.room_compute * (1 - 1 / parts) / room.compute if room.compute else room.idle
    return replace(room, free_bytes=free, idle=idle)


class _Search:
    """`floor` has what must stay."""

    def __init__(self, floor: Placement, needs: Sequence[Need], places: Sequence[PlaceSize]) -> None:
        self.places = places
        self._needs = needs
        self._floor = {place.name: [place.name in here for here in floor.layers] for place in places}

    def orders(self) -> Iterable[Sequence[PlaceSize]]:
        if len(self._needs) * len(self.places) <= SMALL:
            return permutations(self.places)
        return [sorted(self.places, key=lambda p: (-p.compute, -p.room_bytes, p.name))]

    def improved(self, tally: Tally, places: Sequence[PlaceSize]) -> Tally:
        """Sweep over the places until nothing gains."""
        for _ in range(MOST_SWEEPS):
            before = tally.cost
            for place in places:
                change = min(self._changes(tally, place), default=None)
                if change is not None and change[0] < tally.cost * (1 - GAIN):
                    tally.do(change[1])
            if tally.cost >= before * (1 - GAIN):
                break
        return tally

    def kicked(self, tally: Tally) -> Tally:
        """Do what does not gain by itself, and see whether it does with what follows."""
        kicks = sorted(change for place in self.places for change in self._changes(tally, place))
        for _, change in kicks[:KICKS]:
            other = tally.copy()
            other.do(change)
            self.improved(other, [place for place in self.places if place.name != change.place])
            self.improved(other, self.places)
            if other.cost < tally.cost * (1 - GAIN):
                return self.kicked(other)
        return tally

    def _changes(self, tally: Tally, place: PlaceSize) -> Iterator[tuple[float, Change]]:
        """What can be done at a place, with the cost after it."""
        floor = self._floor[place.name]
        here = [place.name in tally.places(layer) and not stays for layer, stays in enumerate(floor)]
        ranges = self._with_room(tally, place, here)
        priced = tally.price(place.name, adds=True) if ranges else None
        for first, last in ranges:
            assert priced is not None
            yield priced.cost(first, last), Change(first, last, place.name, True)
        taken = self._within(tally, here) if any(here) else []
        priced = tally.price(place.name, adds=False) if taken else None
        for first, last in taken:
            assert priced is not None
            yield priced.cost(first, last), Change(first, last, place.name, False)

    def _with_room(self, tally: Tally, place: PlaceSize, here: Sequence[bool]) -> list[tuple[int, int]]:
        """Ranges of layers, (first, last + 1), that a place has room for beside what the plan gave it already."""
        needs, floor = self._needs, self._floor[place.name]
        new = [not (a or b) for a, b in zip(floor, here, strict=True)]
        nbytes = list(accumulate((n.total_bytes * b for n, b in zip(needs, new, strict=True)), initial=0))
        compute = list(accumulate((n.compute * b for n, b in zip(needs, new, strict=True)), initial=0.0))
        free = place.room_bytes - sum(n.total_bytes for n, b in zip(needs, here, strict=True) if b)
        idle = place.room_compute - sum(n.compute for n, b in zip(needs, here, strict=True) if b) + 1e-9
        ends = [
            min(bisect_right(nbytes, b + free), bisect_right(compute, c + idle)) - 1
            for b, c in zip(nbytes, compute, strict=True)
        ]
        fits = ((first, last) for first, last in _ranges(tally, ends) if first < last <= ends[first])
        return [(first, last) for first, last in fits if any(new[first:last])]

    def _within(self, tally: Tally, here: Sequence[bool]) -> list[tuple[int, int]]:
        """Ranges of replicas that the plan gave a place and may take back."""
        spots = range(len(here) + 1) if len(here) <= FEW_RANGES else tally.edges()
        return [(first, last) for first, last in combinations(spots, 2) if all(here[first:last])]


def _ranges(tally: Tally, ends: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Beginnings and ends worth looking at: all, or those of runs, and as far as room goes from there."""
    layers = len(ends) - 1
    if layers <= FEW_RANGES:
        return combinations(range(layers + 1), 2)
    edges = tally.edges()
    reaching = [(first, ends[first]) for first in edges[:-1]]
    reached = [(bisect_left(ends, last), last) for last in edges[1:]]
    return {*combinations(edges, 2), *reaching, *reached}
