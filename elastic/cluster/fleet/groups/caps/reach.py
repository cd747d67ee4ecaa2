"""The largest requests that the instances of a group could hold, so that these wait instead of being refused."""

from __future__ import annotations

from collections.abc import Mapping

from elastic.cluster.control.stage_questions import Room
from elastic.cluster.fleet.dispatcher import Dispatcher
from elastic.cluster.fleet.groups.caps.needs import sector_blocks, shared_memory
from elastic.cluster.fleet.groups.transition import Books, Shape
from elastic.engines.core.kv_state import KVFormat
from elastic.planning.arrangement.caps import largest_caps


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
