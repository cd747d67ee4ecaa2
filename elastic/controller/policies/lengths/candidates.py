"""Instances that could become one for a request, and degrees into which one could part."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter

from elastic.controller.policies.lengths.snapshot import InstanceReading, LiveTokens, tokens_to_end


@dataclass
class InstanceDraft:
    """An instance, with what has been decided for it since the snapshot."""

    reading: InstanceReading
    live: list[LiveTokens] = field(default_factory=list)
    """Live requests, with those that are sent to it now, or that wait for room at it."""
    open: bool = True
    """Whether it takes new requests that any instance could take."""
    taken: bool = False
    """Whether it is becoming another, or is to."""
    promised: bool = False
    """Whether a request waits for room at it: later ones do not go before."""

    def __post_init__(self) -> None:
        reading = self.reading
        self.room = reading.room
        """KV of its live requests together."""
        self.short_tokens = reading.room if reading.degree == 1 else reading.room_below
        """The largest request that does not need its degree."""
        self.live.extend(reading.live)
        self._added = 0
        self._counted = self._sum = -1

    @property
    def load_s(self) -> float:
        """Seconds of work that its requests may still ask for."""
        return (self.reading.pending + self._added) / self.reading.rate

    def add(self, kv: LiveTokens, *, begins: bool = True) -> None:
        """Note a request that is sent here, or that waits for room here; not `begins`: behind another that waits."""
        if begins:
            self.live.append(kv)
        self._added += kv.most

    @property
    def to_end(self) -> int:
        """KV with which all can end."""
        if self._counted != len(self.live):
            self._counted, self._sum = len(self.live), tokens_to_end(self.live)
        return self._sum

    def holds(self, kv: LiveTokens) -> bool:
        """Tell whether a request could begin here now, and all that are here end; and part, if it is a short one."""
        room = self.room
        if self.reading.slots is not None and len(self.live) - len(self.reading.live) >= self.reading.slots:
            return False
        if self.promised or kv.alone > room or self.to_end + kv.held > room:
            return False
        return tokens_to_end([*self.live, kv]) <= room and self._parts_with(kv)

    def _parts_with(self, kv: LiveTokens) -> bool:
        """Tell whether smaller instances could hold a request with all others that fit them.

        So a large instance can part as soon as those have ended for which it is large.
        """
        degree = 1
        while degree < self.reading.degree:
            room = self.reading.capacity.get(degree, 0)
            if kv.alone <= room:
                others = [other for other in self.live if other.alone <= room]
                return max(_spread([*others, kv], [0] * (self.reading.degree // degree))) <= room
            degree *= 2
        return True


def best_merger(
    candidates: Sequence[InstanceDraft],
    kv: LiveTokens,
    step: int,
    most_ranks: int,
    failed: Collection[frozenset[str]] = (),
) -> tuple[InstanceDraft, ...] | None:
    """Return the instances of one host that had best become one for a request; None: no free ones could ever hold it.

    The best hold it at once, are of few ranks, of equal degrees, and have little work. Ranks that have `failed` to
    become one do not again, and others come before each of them.
    """
    late = frozenset[str]().union(*failed)
    free = [candidate for candidate in candidates if not candidate.taken and not candidate.reading.busy]
    free.sort(key=lambda each: (not late.isdisjoint(each.reading.ranks), each.load_s, each.reading.name))
    hosts = dict.fromkeys(candidate.reading.host for candidate in free)
    mergers: list[tuple[tuple[bool, int, bool, float], tuple[InstanceDraft, ...]]] = []
    for host in hosts:
        own = [candidate for candidate in free if candidate.reading.host == host]
        degree = step
        while degree <= most_ranks:
            able = [candidate for candidate in own if kv.alone <= candidate.reading.capacity_at(degree)]
            for members in filter(complete, _sets(able, degree, step)):
                if frozenset(rank for member in members for rank in member.reading.ranks) in failed:
                    continue
                mixed = len({member.reading.degree for member in members}) > 1
                load_s = sum(member.load_s for member in members)
                mergers.append(((not holds_together(members, kv), degree, mixed, load_s), members))
            degree *= 2
    return min(mergers, key=itemgetter(0))[1] if mergers else None


def room_together(members: Sequence[InstanceDraft]) -> int:
    """Return the KV of the instance that some become."""
    degree = sum(member.reading.degree for member in members)
    return min(member.reading.capacity_at(degree) for member in members)


def holds_together(members: Sequence[InstanceDraft], kv: LiveTokens) -> bool:
    """Tell whether the instance that some become would hold a request beside all that they have."""
    live = [request for member in members for request in member.live]
    return tokens_to_end([*live, kv]) <= room_together(members)


def _sets(candidates: Sequence[InstanceDraft], degree: int, step: int) -> Iterator[tuple[InstanceDraft, ...]]:
    """Yield the first instances with so many ranks together: of each degree, and of unlike ones.

    And each of that degree whose change was stopped on its way.
    """
    yield from ((each,) for each in candidates if each.reading.degree == degree and each.reading.whole is not None)
    small = [candidate for candidate in candidates if candidate.reading.degree * step <= degree]
    pipelined = [each.reading for each in small if each.reading.partners]
    pipelines = dict.fromkeys(frozenset((*reading.ranks, *reading.partners)) for reading in pipelined)
    for ranks in pipelines:
        yield tuple(each for each in small if len(ranks) == degree and ranks.issuperset(each.reading.ranks))
    if pipelines:
        yield from _sets([each for each in small if not each.reading.partners], degree, step)
    degrees = {candidate.reading.degree for candidate in small}
    for own in sorted(degrees):
        equal = [candidate for candidate in small if candidate.reading.degree == own]
        if len(equal) * own >= degree:
            yield tuple(equal[: degree // own])
    if len(degrees) > 1:
        mixed: list[InstanceDraft] = []
        left = degree
        for candidate in sorted(small, key=lambda candidate: -candidate.reading.degree):
            if candidate.reading.degree <= left:
                mixed.append(candidate)
                left -= candidate.reading.degree
        if not left:
            yield tuple(mixed)


def complete(members: Sequence[InstanceDraft]) -> bool:
    """Tell whether there are some, and all that compute layers of one of them are ranks of them."""
    ranks = {rank for member in members for rank in member.reading.ranks}
    return bool(members) and all(ranks.issuperset(member.reading.partners) for member in members)


def lower_degree(reading: InstanceReading) -> int | None:
    """Return the least degree of instances into which one can part, each with some of its requests; None: none.

    There must be room for all that the requests may come to need together: while the instance parts, they go on, each
    where it has begun. One of whose layers others compute parts when they do so no more.
    """
    if reading.partners:
        return None
    degree = 1
    while degree < reading.degree:
        room = reading.capacity.get(degree, 0)
        if room and all(kv.alone <= room for kv in reading.live) and max(_shared_out(reading, degree)) <= room:
            return degree
        degree *= 2
    return None


def _shared_out(reading: InstanceReading, degree: int) -> list[int]:
    """Return the KV that requests of an instance may have at each of its parts, of so many ranks: as it would part."""
    part_of = {rank: number // degree for number, rank in enumerate(reading.ranks)}
    held = [0] * (reading.degree // degree)
    for kv in reading.live:
        if kv.home in part_of:
            held[part_of[kv.home]] += kv.most
    return _spread([kv for kv in reading.live if kv.home not in part_of], held)


def _spread(live: Sequence[LiveTokens], held: list[int]) -> list[int]:
    """Have each request in turn, the largest first, go to the emptiest part; return what each has then."""
    for kv in sorted(live, key=attrgetter("most"), reverse=True):
        held[held.index(min(held))] += kv.most
    return held
