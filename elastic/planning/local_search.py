"""A better planner of replicas: whole runs of layers at a time, and back again. It begins where algorithm 1 ends.

Algorithm 1 adds one layer after another, and stops where the first of a run does not pay: to split and join rows for
one layer often costs more than it gains, for ten layers it does not. So every range of layers is priced for a place,
added or taken away, and the best one is applied, until none gains anything.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, cycle, islice, pairwise, permutations

from elastic.planning.cost_model import CostModel, speedup
from elastic.planning.incremental_cost import CostChange, IncrementalCost, RangeCosts
from elastic.planning.placement import PlaceCapacity, Placement, ResourceDemand, added_replicas, occupied
from elastic.planning.scale_up import GAIN, add_replicas

MOST_SWEEPS = 3
FEW_RANGES = 32
"""Layers up to which every range is looked at; of more, those that begin or end where runs do or room ends."""
SMALL = 48
"""Layers times places up to which places, if they are few, are tried in every order, and changes that gain nothing by
themselves too."""
FEW_PLACES = 6
KICKS = 64
"""Of these changes, the cheapest."""


def plan_up(
    placement: Placement,
    needs: Sequence[ResourceDemand],
    places: Sequence[PlaceCapacity],
    model: CostModel,
    t_up: float = 0.2,
) -> Placement:
    """Return the cheapest placement found: at least as good as algorithm 1's, and within the same margins.

    Replicas that are there already stay. `needs` are of all layers.
    """
    search = _ReplicaSearch(placement, needs, [place for place in places if place.vacancy > t_up])
    begin = IncrementalCost(model, placement)
    tried = [add_replicas(begin.copy(), needs, search.places)]
    tried += [search.improved(begin.copy(), order) for order in search.orders()]
    if len(needs) * len(search.places) <= SMALL:
        tried.append(search.improved(tried[0].copy(), search.places))
        tried.append(search.kicked(min(tried, key=lambda present: present.cost)))
    return min(tried, key=lambda present: present.cost).placement


@dataclass(frozen=True)
class PlannedModel:
    """A model that shares places with others."""

    placement: Placement
    needs: tuple[ResourceDemand, ...]
    model: CostModel
    places: tuple[str, ...] = ()
    """Those that it may use; (): all."""

    def offered(self, rooms: Iterable[PlaceCapacity], parts: int) -> list[PlaceCapacity]:
        """Return the places that it may use, each with one of so many equal parts of its room."""
        offered = []
        for room in rooms:
            if not self.places or room.name in self.places:
                free = room.free_bytes - room.room_bytes + room.room_bytes // parts
                used = room.room_compute * (1 - 1 / parts) / room.compute if room.compute else 0.0
                offered.append(replace(room, free_bytes=free, idle=room.idle - used))
        return offered


def plan_together(
    instances: Mapping[str, PlannedModel], places: Sequence[PlaceCapacity], t_up: float
) -> dict[str, Placement]:
    """Return placements of several models that lend each other places, by instance.

    First each may have an equal part of every room, the slowest (by S) first; then each is planned again with all that
    the others leave. Bytes and compute that one takes, the next does not have.
    """
    planned = {name: instance.placement for name, instance in instances.items()}
    rooms = {place.name: place for place in places}
    for parts in (len(instances), 1):
        for name in sorted(planned, key=lambda name: (speedup(instances[name].model, planned[name]), name)):
            instance = instances[name]
            home, needs = instance.placement, instance.needs
            rooms = occupied(rooms, added_replicas(home, planned[name]), needs, times=-1)
            planned[name] = plan_up(home, needs, instance.offered(rooms.values(), parts), instance.model, t_up)
            rooms = occupied(rooms, added_replicas(home, planned[name]), needs)
    return planned


class _ReplicaSearch:
    """Changes of replicas at places, tried one by one; those of `floor` stay."""

    def __init__(self, floor: Placement, needs: Sequence[ResourceDemand], places: Sequence[PlaceCapacity]) -> None:
        self.places = places
        self._needs = needs
        self._nbytes = _before([need.total_bytes for need in needs])
        self._compute = _before([need.compute for need in needs])
        self._floor = {place.name: [place.name in layer for layer in floor.layers] for place in places}

    def orders(self) -> Iterable[Sequence[PlaceCapacity]]:
        """Return the orders in which places are tried."""
        if len(self.places) <= FEW_PLACES and len(self._needs) * len(self.places) <= SMALL:
            return permutations(self.places)
        return [sorted(self.places, key=lambda p: (-p.compute, -p.room_bytes, p.name))]

    def improved(self, present: IncrementalCost, places: Sequence[PlaceCapacity]) -> IncrementalCost:
        """Sweep over the places until none of them gains."""
        idle = 0
        for place in islice(cycle(places), MOST_SWEEPS * len(places)):
            change = min(self._changes(present, place), default=None)
            idle += 1
            if change is not None and change.cost < present.cost * (1 - GAIN):
                present.apply(change)
                idle = 0
            if idle == len(places):
                break
        return present

    def kicked(self, present: IncrementalCost) -> IncrementalCost:
        """Apply what does not gain by itself, and see whether it does with what follows."""
        kicks = sorted(change for place in self.places for change in self._changes(present, place))
        for change in kicks[:KICKS]:
            other = present.copy()
            other.apply(change)
            self.improved(other, [place for place in self.places if place.name != change.place])
            self.improved(other, self.places)
            if other.cost < present.cost * (1 - GAIN):
                return self.kicked(other)
        return present

    def _changes(self, present: IncrementalCost, place: PlaceCapacity) -> Iterator[CostChange]:
        """Yield what can be changed at a place, with the cost after it."""
        edges, numbers = present.runs
        runs = [place.name in present.sets[number] for number in numbers]
        layers = [has for has, (first, last) in zip(runs, pairwise(edges), strict=True) for _ in range(first, last)]
        for adds, find in ((True, self._with_room), (False, self._removable)):
            ranges = find(present, place, layers) if any(runs) or adds else ()
            if ranges:
                yield from RangeCosts(present, place.name, adds).changes(ranges)

    def _with_room(
        self, present: IncrementalCost, place: PlaceCapacity, has: Sequence[bool]
    ) -> Collection[tuple[int, int]]:
        """Return ranges of layers, (first, last + 1), that a place has room for beside what the plan gave it already.

        `has` says of each layer whether the place has it.
        """
        if not any(has):
            return _ranges(present, _Room(self._nbytes, self._compute, place.room_bytes, place.room_compute + 1e-9))
        floor = self._floor[place.name]
        taken = [need for need, there, stays in zip(self._needs, has, floor, strict=True) if there and not stays]
        room = _Room(
            _before([0 if there else need.total_bytes for need, there in zip(self._needs, has, strict=True)]),
            _before([0 if there else need.compute for need, there in zip(self._needs, has, strict=True)]),
            place.room_bytes - sum(need.total_bytes for need in taken),
            place.room_compute - sum(need.compute for need in taken) + 1e-9,
        )
        count = _before(has)
        return [(first, last) for first, last in _ranges(present, room) if count[last] - count[first] < last - first]

    def _removable(
        self, present: IncrementalCost, place: PlaceCapacity, has: Sequence[bool]
    ) -> Collection[tuple[int, int]]:
        """Return ranges of replicas that the plan gave a place and may take back."""
        given = _before([there and not stays for there, stays in zip(has, self._floor[place.name], strict=True)])
        ranges = combinations(_bounds(present), 2)
        return [(first, last) for first, last in ranges if given[last] - given[first] == last - first]


@dataclass(frozen=True)
class _Room:
    """The memory and compute that a place has left, and what all layers before each one need of both."""

    nbytes: Sequence[float]
    compute: Sequence[float]
    free_bytes: float
    idle: float

    def end(self, first: int) -> int:
        """Return up to where layers fit that begin here."""
        by_bytes = bisect_right(self.nbytes, self.nbytes[first] + self.free_bytes)
        return min(by_bytes, bisect_right(self.compute, self.compute[first] + self.idle)) - 1

    def begin(self, last: int) -> int:
        """Return from where on layers fit that end here."""
        by_bytes = bisect_left(self.nbytes, self.nbytes[last] - self.free_bytes)
        return max(by_bytes, bisect_left(self.compute, self.compute[last] - self.idle))


def _ranges(present: IncrementalCost, room: _Room) -> Collection[tuple[int, int]]:
    """Return the ranges that fit and are worth looking at: all of them, if layers are few.

    Of many layers those that begin or end where runs do, and reach to where others do or as far as room does.
    """
    bounds = _bounds(present)
    ends = {first: room.end(first) for first in bounds[:-1]}
    fits = [(first, last) for first, last in combinations(bounds, 2) if last <= ends[first]]
    reaching = [(first, end) for first, end in ends.items() if first < end]
    reached = [(begin, last) for begin, last in ((room.begin(last), last) for last in bounds[1:]) if begin < last]
    return {*fits, *reaching, *reached}


def _bounds(present: IncrementalCost) -> Sequence[int]:
    """Return the layers where ranges may begin and end."""
    edges = present.runs.edges
    return range(edges[-1] + 1) if edges[-1] <= FEW_RANGES else edges


def _before(amounts: Iterable[float]) -> list[float]:
    """Return the sums of those before each one, and before the end."""
    return list(accumulate(amounts, initial=0))
