"""A fleet as its overload policy sees it: what instances said last, what they were given since, and what waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

from elastic import clock
from elastic.cluster.fleet.dispatcher import Dispatcher
from elastic.cluster.fleet.groups import targets
from elastic.cluster.fleet.groups.results import GroupStatus
from elastic.cluster.fleet.instance import Instance
from elastic.cluster.fleet.planning.starvation import waiting_answers
from elastic.cluster.fleet.records.requests import RequestRecord
from elastic.controller.fleet_snapshot import FleetSnapshot, GroupReading, MemberReading, request_bytes
from elastic.engines.core.kv_state import KVFormat
from elastic.planning.arrangement.stages import Held


class FleetReadings:
    """Makes snapshots, and remembers what each instance's capacity was with all layers.

    One by itself at which nothing waits is read again when something of it is another than before.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._base: dict[tuple[str, ...], int] = {}  # ranks that share layers -> their blocks with all of them
        self._earlier: WeakKeyDictionary[Instance, tuple[tuple[int, int], GroupReading]] = WeakKeyDictionary()

    def read(
        self, groups: Sequence[GroupStatus], layer_bytes: tuple[int, ...], *, busy: bool = False
    ) -> FleetSnapshot | None:
        """Return the fleet as it is now; None: no rank serves. Instances that serve in no group are one each.

        `busy`: somebody has layers change their rank just now. A group that has lost a member is left out: it is
        about to part. Ranks that share layers are one instance, in the name of the first.
        """
        dispatcher, now, layers = self._dispatcher, clock.now(), frozenset(range(len(layer_bytes)))
        with dispatcher.lock:
            serving = {instance.name: instance for instance in dispatcher.serving()}
            usual = dispatcher.answer_lengths.usual()
            self._base = {names: blocks for names, blocks in self._base.items() if serving.keys() >= {*names}}
            readings = [
                self._group(serving, group, usual, now)
                for group in groups
                if all(name in serving for name in group.members)
            ]
            grouped = {name for group in groups for name in group.members}
            for name, instance in serving.items():
                if name not in grouped:
                    readings.append(self._alone(instance, layers, usual, now))
            if not readings:
                return None
            kv = next(iter(serving.values())).kv_format
            queue = list(dispatcher.queue)
            if any(i.policy_blocks for i in serving.values()):  # it sees to those that no instance is large enough for
                queue = [record for record in queue if any(i.fits_alone(record.request) for i in serving.values())]
            return FleetSnapshot(
                now,
                tuple(replace(reading, busy=True) for reading in readings) if busy else tuple(readings),
                layer_bytes,
                queued_bytes=sum(needed_bytes(kv, record, usual) for record in queue),
                queue_s=max((now - record.arrived_s for record in queue), default=0.0),
            )

    # -- inside, under the dispatcher's lock

    def _alone(self, instance: Instance, layers: frozenset[int], usual: int | None, now: float) -> GroupReading:
        names, of = (instance.name,), (instance.changes, len(layers))
        earlier = self._earlier.get(instance)
        if earlier is not None and earlier[0] == of:
            self._base[names] = instance.load.total_blocks
            return earlier[1]
        member = self._member(names, {instance.name: instance}, layers, whole=True)
        reading = _reading([instance], (member,), usual, now)
        if not instance.load.waiting:  # else it tells how long, and by how much
            self._earlier[instance] = of, reading
        return reading

    def _group(
        self, serving: Mapping[str, Instance], group: GroupStatus, usual: int | None, now: float
    ) -> GroupReading:
        units = targets.sharing(group.paths)
        pairs = zip(units, targets.held(group.paths, group.shards), strict=True)
        members = tuple(self._member(unit, serving, held.layers, whole=len(units) == 1) for unit, held in pairs)
        return _reading([serving[name] for name in group.members], members, usual, now)

    def _member(
        self, names: tuple[str, ...], serving: Mapping[str, Instance], layers: frozenset[int], *, whole: bool
    ) -> MemberReading:
        """Return the reading of one rank, or of those that share layers; `whole`: they compute all that is theirs."""
        instances = [serving[name] for name in names]
        size, blocks = instances[0].kv_format.group_block_bytes, sum(each.load.total_blocks for each in instances)
        if whole:
            self._base[names] = blocks
        base = self._base.get(names, blocks)
        return MemberReading(Held(names[0], layers), base * size, sum(map(_committed, instances)) * size)


def _reading(
    instances: Sequence[Instance], members: tuple[MemberReading, ...], usual: int | None, now: float
) -> GroupReading:
    waiting = [(instance.kv_format, *each) for instance in instances for each in waiting_answers(instance)]
    sizes = [instance.kv_format.group_block_bytes for instance in instances]
    return GroupReading(
        members,
        capacity_bytes=sum(i.load.total_blocks * size for i, size in zip(instances, sizes, strict=True)),
        used_bytes=sum(_committed(i) * size for i, size in zip(instances, sizes, strict=True)),
        waiting_bytes=sum(needed_bytes(kv, record, usual, answers) for kv, record, answers in waiting),
        queue_s=max((now - record.given_s for _, record, _ in waiting), default=0.0),  # before, it was at the fleet
        running=sum(instance.sequences for instance in instances),
    )


def _committed(instance: Instance) -> int:
    """Count the blocks that live requests have or are promised, as the instance said last."""
    return instance.load.total_blocks - min(instance.load.total_blocks, instance.load.free_blocks)


def needed_bytes(kv: KVFormat, record: RequestRecord, usual: int | None, answers: int | None = None) -> int:
    """Return the KV that waiting answers of a request are taken to need (None: all of them).

    `usual`: tokens of an answer, None: all it may have. The prompt is there where another one of the answers runs.
    """
    waiting, most = record.left if answers is None else answers, record.request.max_tokens
    prompt = len(record.request.prompt) if waiting == record.left else 0
    so_far = max((len(answer.tokens) for answer in record.live), default=0)
    expected = most if usual is None else max(usual, so_far)
    needed = 0
    for layers, window in kv.groups:
        token_bytes = kv.block_bytes * len(layers) // kv.block_tokens
        nbytes = request_bytes(prompt, waiting * most, waiting * expected, token_bytes)
        needed += nbytes if window is None else min(nbytes, waiting * window * token_bytes)
    return needed
