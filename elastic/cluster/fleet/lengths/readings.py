"""A fleet as its policy of lengths sees it. KV is counted in blocks, and of a request as that of one answer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from elastic import clock
from elastic.cluster.fleet.dispatcher import Dispatcher
from elastic.cluster.fleet.groups.results import GroupStatus
from elastic.cluster.fleet.groups.targets import sharing
from elastic.cluster.fleet.instance import AHEAD, Instance, blocks_of
from elastic.cluster.fleet.records.requests import RequestRecord
from elastic.controller.policies.lengths.snapshot import InstanceReading, LengthSnapshot, LiveTokens, WaitingRequest

Capacity = Mapping[str, Mapping[int, int]]
"""Rank -> degree -> the blocks of an instance of so many ranks like it."""


class LengthReadings:
    """Makes snapshots. A group whose ranks share layers is one instance; it has the name of its first rank.

    What is read follows what changed: an instance of one rank is read again when something of it is another than
    before, and where no request waits those of several ranks are read alone, as nothing else can be decided of.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._earlier: WeakKeyDictionary[Instance, tuple[object, InstanceReading]] = WeakKeyDictionary()

    def read(
        self, groups: Sequence[GroupStatus], capacity: Capacity, changing: Collection[str] = ()
    ) -> LengthSnapshot | None:
        """Return the fleet as it is now; None: no rank serves. Takes the dispatcher's lock.

        `changing`: ranks whose layers are being shared out just now. A group that has lost a member is left out.
        """
        dispatcher = self._dispatcher
        with dispatcher.lock:
            serving = {instance.name: instance for instance in dispatcher.serving()}
            if not serving:
                return None
            usual, any_of = dispatcher.answer_lengths.usual(), next(iter(serving.values()))
            units = [unit for unit in _units(groups, serving) if dispatcher.queue or len(unit.ranks) > 1]
            readings = tuple(
                self._read([serving[name] for name in unit.ranks], unit, capacity, usual, frozenset(changing))
                for unit in units
            )
            waiting = tuple(
                WaitingRequest(record.request.id, _kv(any_of, record), record.arrived_s) for record in dispatcher.queue
            )
        return LengthSnapshot(clock.now(), readings, waiting)

    def _read(
        self,
        instances: Sequence[Instance],
        unit: _Unit,
        capacity: Capacity,
        usual: int | None,
        changing: frozenset[str],
    ) -> InstanceReading:
        """Return what there is of a unit now; of one rank what was read before, if nothing of it has changed."""
        if len(instances) > 1:
            return _reading(instances, unit, capacity, usual, changing)
        (instance,) = instances
        expected = usual if instance.records else None
        of = instance.changes, unit, capacity.get(instance.name), expected, instance.name in changing
        earlier = self._earlier.get(instance)
        if earlier is None or earlier[0] != of:
            earlier = self._earlier[instance] = of, _reading(instances, unit, capacity, usual, changing)
        return earlier[1]


class _Unit(NamedTuple):
    """The ranks of an instance, those that share layers together."""

    ranks: tuple[str, ...]
    partners: tuple[str, ...] = ()
    """The others that compute layers of it."""
    partial: bool = False
    """Whether they share some of its layers alone: a change was stopped on its way."""


def _units(groups: Sequence[GroupStatus], serving: Mapping[str, Instance]) -> Iterator[_Unit]:
    for group in groups:
        if all(name in serving for name in group.members):
            for ranks in sharing(group.paths):
                partners, paths = _partners(ranks, group), [group.paths[name] for name in ranks]
                whole = all(len(holders) == len(ranks) for path in paths for holders, _ in path.runs)
                yield _Unit(ranks, partners, not partners and not whole)
    kept = [group for group in groups if group.tp > 1 or all(name in serving for name in group.members)]
    grouped = {name for group in kept for name in group.members}
    yield from (_Unit((name,)) for name in serving if name not in grouped)


def _partners(unit: tuple[str, ...], group: GroupStatus) -> tuple[str, ...]:
    """Return the ranks that compute layers of some, or of which these compute some."""
    paths = [path for home, path in group.paths.items() if not {home, *path.helpers}.isdisjoint(unit)]
    return tuple(dict.fromkeys(rank for path in paths for rank in (path.home, *path.helpers) if rank not in unit))


def _reading(
    instances: Sequence[Instance], unit: _Unit, capacity: Capacity, usual: int | None, changing: frozenset[str]
) -> InstanceReading:
    first, records = instances[0], [record for instance in instances for record in instance.records.values()]
    degree = len(instances)
    blocks = dict(_least([capacity.get(instance.name, {}) for instance in instances]))
    whole = blocks.get(degree) if unit.partial else None
    if degree == 1 or unit.partners:
        blocks[degree] = sum(instance.load.total_blocks for instance in instances)
    elif reached := max(instance.group_blocks for instance in instances):
        blocks[degree] = min(blocks.get(degree, reached), reached)
    slots = sum(max(0, i.hello.max_requests + AHEAD - i.sequences) for i in instances)
    return InstanceReading(
        first.name,
        first.hello.host,
        tuple(instance.name for instance in instances),
        blocks,
        tuple(_kv(first, record) for record in records),
        sum(_pending(record, usual) for record in records),
        float(degree),
        not changing.isdisjoint(unit.ranks),
        unit.partners,
        slots,
        whole,
    )


def _least(tables: Sequence[Mapping[int, int]]) -> Mapping[int, int]:
    """Return the least of some tables at each degree that all of them have."""
    first, *others = tables
    if not others:
        return first
    return {degree: min(table[degree] for table in tables) for degree in first if all(degree in t for t in others)}


def _kv(instance: Instance, record: RequestRecord) -> LiveTokens:
    """Return the blocks that a request has when it goes on, and those that it may come to need besides."""
    kv, request = instance.kv_format, record.request
    so_far = max((len(answer.tokens) for answer in record.live), default=0)
    held = blocks_of(kv, len(request.prompt) + so_far + 1)
    most = max(held, blocks_of(kv, len(request.prompt) + request.max_tokens))
    return LiveTokens(held, most - held, max(0, instance.request_blocks(request) - most), record.instance or "")


def _pending(record: RequestRecord, usual: int | None) -> float:
    """Return the tokens that a request will probably have computed yet; `usual`: those of an answer, None: unknown."""
    most = record.request.max_tokens
    expected = most if usual is None else min(most, usual)
    prompt = 0 if record.begun else len(record.request.prompt)
    return prompt + sum(max(1, expected - len(answer.tokens)) for answer in record.live)
