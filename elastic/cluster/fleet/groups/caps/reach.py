"""The largest requests that the instances of a group could hold, so that these wait instead of being refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from elastic.cluster.control.stage_questions import Room
from elastic.cluster.fleet.dispatcher import Dispatcher
from elastic.cluster.fleet.groups.caps.needs import sector_blocks, shared_memory
from elastic.cluster.fleet.groups.targets import parallel
from elastic.cluster.fleet.groups.transition import Books, Shape
from elastic.engines.core.kv_state import KVFormat
from elastic.engines.pipeline.path import LayerPath
from elastic.planning.arrangement.caps import largest_caps


def blocks_by_degree(home: str, room: Room, format: KVFormat, degrees: Iterable[int]) -> dict[int, int]:
    """Return the blocks of one instance by the number of ranks, all with the memory of this one, that share its layers.

    Degrees for which its layers are not cut are left out.
    """
    found = {}
    for degree in degrees:
        if room.path.shards % degree == 0:
            names = [home, *(f"{home}, {number}" for number in range(1, degree))]
            alone = {name: LayerPath.alone(name, room.path.layers, room.path.shards) for name in names}
            shape = parallel(Shape(alone, dict.fromkeys(names, frozenset(range(len(room.path.ranks))))), degree)
            rooms = {name: replace(room, path=alone[name]) for name in names}
            found[degree] = reachable_blocks(shape, rooms, {home: format})[home]
    return found


def note_reach(dispatcher: Dispatcher, shape: Shape, rooms: Mapping[str, Room]) -> None:
    """Have the instances of a group know the highest limits that its caps allow, one after another."""
    with dispatcher.lock:
        there = {home: i for home in shape.members if (i := dispatcher.instances.get(home)) is not None}
        for home, blocks in reachable_blocks(shape, rooms, {h: i.kv_format for h, i in there.items()}).items():
            there[home].group_blocks = blocks


def reachable_blocks(shape: Shape, rooms: Mapping[str, Room], formats: Mapping[str, KVFormat]) -> dict[str, int]:
    """Return the blocks that each of these instances could have in a shape, if the others of it had none."""
    if not formats:
        return {}
    books = Books(rooms, next(iter(formats.values())), shape)
    caps = largest_caps(shared_memory(books, shape), {home: rooms[home].most_sectors for home in shape.members})
    return {home: caps[home] * sector_blocks(rooms[home], kv) for home, kv in formats.items()}
