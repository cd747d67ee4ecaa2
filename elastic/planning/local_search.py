"""A better planner of replicas: whole runs of layers at a time, and back again. It begins where algorithm 1 ends.

Algorithm 1 adds one layer after another, and stops where the first of a run does not pay: rows that go apart and come
together for one layer often cost more than they gain, for ten layers they do not. So every range of layers is
priced for a place, added or taken away, and the best one is done, until none gains anything.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, cycle, islice, pairwise, permutations

from elastic.planning.cost_model import CostModel, speedup
from elastic.planning.incremental_cost import CostChange, IncrementalCost
from elastic.planning.placement import PlaceCapacity, Placement, ResourceDemand
from elastic.planning.scale_up import GAIN, add_replicas, eligible

MOST_SWEEPS = 3
FEW_RANGES = 32
"""Layers up to which every range is looked at; of more, those that begin or end where runs do or room ends."""
SMALL = 48
"""Layers times places up to which places are tried in every order, and changes that gain nothing by themselves too."""
KICKS = 64
"""Of these changes, the cheapest."""


def plan_up(
    placement: Placement,
    needs: Sequence[ResourceDemand],
    places: Sequence[PlaceCapacity],
    model: CostModel,
    t_up: float = 0.2,
) -> Placement:
    """The cheapest placement found: at least as good as that of algorithm 1, and within the same margins.

    Replicas that are there already stay. `needs` are of all layers.
    """
    search = _Search(placement, needs, eligible(places, t_up))
    begin = IncrementalCost(model, placement)
    found = [add_replicas(begin.copy(), needs, search.places)]
    found += [search.improved(begin.copy(), order) for order in search.orders()]
    if len(needs) * len(search.places) <= SMALL:
        found.append(search.improved(found[0].copy(), search.places))
        found.append(search.kicked(_cheapest(found)))
    return _cheapest(found).placement


def _cheapest(tallies: Sequence[IncrementalCost]) -> IncrementalCost:
    return min(tallies, key=lambda tally: tally.cost)


@dataclass(frozen=True)
class PlannedModel:
    """A model that shares places with others."""

    placement: Placement
    needs: tuple[ResourceDemand, ...]
    model: CostModel
    places: tuple[str, ...] = ()
    """Those that it may use; (): all."""

    def offered(self, rooms: Iterable[PlaceCapacity], parts: int) -> list[PlaceCapacity]:
        """One of so many equal parts of each room that it may use."""
        return [_part(room, parts) for room in rooms if not self.places or room.name in self.places]


def plan_together(
    instances: Mapping[str, PlannedModel], places: Sequence[PlaceCapacity], t_up: float = 0.2
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


def _take(rooms: dict[str, PlaceCapacity], one: PlannedModel, planned: Placement, times: int) -> None:
    """What was planned for an instance leaves the rooms, or with -1 comes back."""
    pairs = enumerate(zip(one.placement.layers, planned.layers, strict=True))
    for place, layer in [(place, i) for i, (old, new) in pairs for place in new if place not in old]:
        rooms[place] = rooms[place].having(one.needs[layer], times)


def _part(room: PlaceCapacity, parts: int) -> PlaceCapacity:
    """A place that offers one of so many equal parts of its room."""
    free = room.free_bytes - room.room_bytes + room.room_bytes // parts
    idle = room.idle - room.room_compute * (1 - 1 / parts) / room.compute if room.compute else room.idle
    return replace(room, free_bytes=free, idle=idle)


class _Search:
    """`floor` has what must stay."""

    def __init__(self, floor: Placement, needs: Sequence[ResourceDemand], places: Sequence[PlaceCapacity]) -> None:
        self.places = places
        self._needs = needs
        self._nbytes = _before([need.total_bytes for need in needs])
        self._compute = _before([need.compute for need in needs])
        self._floor = {place.name: [place.name in here for here in floor.layers] for place in places}

    def orders(self) -> Iterable[Sequence[PlaceCapacity]]:
        if len(self._needs) * len(self.places) <= SMALL:
            return permutations(self.places)
        return [sorted(self.places, key=lambda p: (-p.compute, -p.room_bytes, p.name))]

    def improved(self, tally: IncrementalCost, places: Sequence[PlaceCapacity]) -> IncrementalCost:
        """Sweep over the places until none of them gains."""
        idle = 0
        for place in islice(cycle(places), MOST_SWEEPS * len(places)):
            change = min(self._changes(tally, place), default=None)
            idle += 1
            if change is not None and change.cost < tally.cost * (1 - GAIN):
                tally.do(change)
                idle = 0
            if idle == len(places):
                break
        return tally

    def kicked(self, tally: IncrementalCost) -> IncrementalCost:
        """Do what does not gain by itself, and see whether it does with what follows."""
        kicks = sorted(change for place in self.places for change in self._changes(tally, place))
        for change in kicks[:KICKS]:
            other = tally.copy()
            other.do(change)
            self.improved(other, [place for place in self.places if place.name != change.place])
            self.improved(other, self.places)
            if other.cost < tally.cost * (1 - GAIN):
                return self.kicked(other)
        return tally

    def _changes(self, tally: IncrementalCost, place: PlaceCapacity) -> Iterator[CostChange]:
        """What can be done at a place, with the cost after it."""
        name, (edges, numbers) = place.name, tally.runs
        has = [name in tally.places(number) for number in numbers]
        here = [b for b, (first, last) in zip(has, pairwise(edges), strict=True) for _ in range(first, last)]
        for adds, find in ((True, self._with_room), (False, self._within)):
            ranges = find(tally, place, here) if any(has) or adds else ()
            if ranges:
                yield from tally.price(name, adds=adds).changes(ranges)

    def _with_room(
        self, tally: IncrementalCost, place: PlaceCapacity, here: Sequence[bool]
    ) -> Collection[tuple[int, int]]:
        """Ranges of layers, (first, last + 1), that a place has room for beside what the plan gave it already."""
        if not any(here):
            return _ranges(tally, _Room(self._nbytes, self._compute, place.room_bytes, place.room_compute + 1e-9))
        floor = self._floor[place.name]
        taken = [need for need, b, stays in zip(self._needs, here, floor, strict=True) if b and not stays]
        room = _Room(
            _before([0 if b else need.total_bytes for need, b in zip(self._needs, here, strict=True)]),
            _before([0 if b else need.compute for need, b in zip(self._needs, here, strict=True)]),
            place.room_bytes - sum(need.total_bytes for need in taken),
            place.room_compute - sum(need.compute for need in taken) + 1e-9,
        )
        count = _before(here)
        return [(first, last) for first, last in _ranges(tally, room) if count[last] - count[first] < last - first]

    def _within(
        self, tally: IncrementalCost, place: PlaceCapacity, here: Sequence[bool]
    ) -> Collection[tuple[int, int]]:
        """Ranges of replicas that the plan gave a place and may take back."""
        given = _before([b and not stays for b, stays in zip(here, self._floor[place.name], strict=True)])
        ranges = combinations(_spots(tally), 2)
        return [(first, last) for first, last in ranges if given[last] - given[first] == last - first]


@dataclass(frozen=True)
class _Room:
    """What a place has left, beside what all layers before each one need, and those before the end."""

    nbytes: Sequence[float]
    compute: Sequence[float]
    free_bytes: float
    idle: float

    def end(self, first: int) -> int:
        """Up to where layers fit that begin here."""
        by_bytes = bisect_right(self.nbytes, self.nbytes[first] + self.free_bytes)
        return min(by_bytes, bisect_right(self.compute, self.compute[first] + self.idle)) - 1

    def begin(self, last: int) -> int:
        """From where on layers fit that end here."""
        by_bytes = bisect_left(self.nbytes, self.nbytes[last] - self.free_bytes)
        return max(by_bytes, bisect_left(self.compute, self.compute[last] - self.idle))


def _ranges(tally: IncrementalCost, room: _Room) -> Collection[tuple[int, int]]:
    """What fits, from beginning to end, and is worth looking at: all; of many layers what begins or ends where runs do,
    and goes to where others do or as far as room does."""
    spots = _spots(tally)
    ends = {first: room.end(first) for first in spots[:-1]}
    fits = [(first, last) for first, last in combinations(spots, 2) if last <= ends[first]]
    reaching = [(first, end) for first, end in ends.items() if first < end]
    reached = [(begin, last) for begin, last in ((room.begin(last), last) for last in spots[1:]) if begin < last]
    return {*fits, *reaching, *reached}


def _spots(tally: IncrementalCost) -> Sequence[int]:
    """Where ranges may begin and end."""
    edges = tally.runs.edges
    return range(edges[-1] + 1) if edges[-1] <= FEW_RANGES else edges


def _before(amounts: Iterable[float]) -> list[float]:
    """The sums of those before each one, and before the end."""
    return list(accumulate(amounts, initial=0))
