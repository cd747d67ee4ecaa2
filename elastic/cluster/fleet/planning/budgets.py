"""What ranks tell of themselves that a plan of drops must fit: their memory, what is in it, and how fast they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from elastic.cluster.control.stage_questions import Room
from elastic.cluster.fleet.groups.targets import sharing
from elastic.cluster.fleet.instance import Instance
from elastic.controller.fleet_snapshot import FleetSnapshot
from elastic.engines.core.kv_state import KVFormat
from elastic.engines.pipeline.path import LayerPath
from elastic.errors import StateError
from elastic.planning.arrangement.stages import Held
from elastic.planning.pipeline.chunk_cost import Chunk
from elastic.planning.sharding.heads import kv_parts
from elastic.planning.sharding.numbers import by_layer

COMPARED = Chunk("", 0, 8)
"""By what this takes them in a layer ranks are compared: all have measured batches that are as small."""
UNLIKE = 1.5
"""So many times as long as another a rank must take, to be slower: it was measured once, for two seconds, perhaps while
others loaded their models beside it."""


class Budgets:
    """Of ranks, and of those that share layers together.

    Where all ranks have as much memory and are as fast, memory is no limit of a plan: layers then leave as much room
    everywhere as they take elsewhere, and caps follow. Else each must have room for its stage, with the keys and values
    of live requests, those that they are promised included.
    """

    def __init__(self, rooms: Mapping[str, Room], instances: Sequence[Instance]) -> None:
        """The instances are those of the rooms' ranks. Raises `StateError` where there is none."""
        if not instances:
            raise StateError("no rank serves: no drop can be planned")
        self._bytes = {  # for decoder layers, in full weights, and keys and values
            rank: (room.pages + room.weights_of(room.resident) - room.growth_pages) * room.page_bytes
            for rank, room in rooms.items()
        }
        self._units = {unit[0]: unit for unit in sharing(_complete({rank: room.path for rank, room in rooms.items()}))}
        self._kv = _kv_bytes(rooms, instances[0].kv_format)
        costs = {instance.name: instance.hello.cost for instance in instances}
        seconds = {rank: cost.layer(COMPARED) for rank, cost in costs.items() if cost is not None}
        self._seconds = seconds if seconds.keys() >= rooms.keys() else {}
        unlike = any(self._slowness((rank,)) > 1.0 for rank in self._seconds)
        self._limited = unlike or len(set(self._bytes.values())) > 1

    def fitted(self, held: Held) -> Held:
        """Return a rank, or those that share layers in the name of the first, as plans of drops are to see it."""
        unit = self._units.get(held.name)
        if unit is None:  # it came since, or has lost a rank that computes layers of it
            return held
        kv_bytes = tuple(map(sum, zip(*(self._kv[rank] for rank in unit), strict=True)))
        room_bytes = sum(self._bytes[rank] for rank in unit) if self._limited else None
        return replace(held, room_bytes=room_bytes, kv_bytes=kv_bytes, slowness=self._slowness(unit))

    def of_all(self, snapshot: FleetSnapshot) -> FleetSnapshot:
        """Return a snapshot of which all members are fitted."""
        groups = []
        for group in snapshot.groups:
            members = (replace(member, held=self.fitted(member.held)) for member in group.members)
            groups.append(replace(group, members=tuple(members)))
        return replace(snapshot, groups=tuple(groups))

    def _slowness(self, unit: Collection[str]) -> float:
        """Return how many times as long as the fastest they take, to a tenth; 1.0 below `UNLIKE`."""
        if not self._seconds:
            return 1.0
        slowness = max(self._seconds[rank] for rank in unit) / min(self._seconds.values())
        return round(slowness, 1) if slowness >= UNLIKE else 1.0


def _complete(paths: Mapping[str, LayerPath]) -> dict[str, LayerPath]:
    """Return the paths of which all ranks are there, and the paths of these are complete."""
    complete = dict(paths)
    while lost := [rank for rank, path in complete.items() if not complete.keys() >= {*path.ranks}]:
        for rank in lost:
            del complete[rank]
    return complete


def _kv_bytes(rooms: Mapping[str, Room], kv: KVFormat) -> dict[str, list[int]]:
    """Return the keys and values that each rank has of each layer, of all instances.

    Sectors are of one group of layers each. Of which is not told: together they are those of the largest group.
    """
    there = {rank: [0] * room.path.layers for rank, room in rooms.items()}
    for room in rooms.values():
        pages = [sum(room.sector_pages[part] for part in parts) for parts, _ in kv.groups]
        sectors = room.committed_sectors * max(pages) / sum(pages)
        for rank in there.keys() & {*room.path.ranks}:
            path = room.path
            shape = path.shards_of(rank), path.numbers, path.shards, room.sector_pages
            for layer, needed in _sector_pages(*shape):
                there[rank][layer] += int(sectors * needed) * room.page_bytes
    return there


@lru_cache(maxsize=256)
def _sector_pages(
    shards: tuple[int, ...], numbers: int, of: int, sector_pages: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    """Return each layer of shards, and the pages that a sector has in the parts of it that they need.

    Ranks that are alike ask for the same, at every look.
    """
    each, layers = len(sector_pages) // (numbers // of), by_layer({shard % numbers for shard in shards}, of)
    return tuple(
        (layer, sum(sector_pages[part] for part in kv_parts({layer * of + part for part in parts}, of, each)))
        for layer, parts in layers.items()
    )
