"""The largest requests that instances could hold in a group, so that these wait instead of being refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from elastic.cluster.control.stage_questions import Room
from elastic.cluster.fleet.dispatcher import Dispatcher
from elastic.cluster.fleet.groups.caps.needs import load_blocks, shared_memory
from elastic.cluster.fleet.groups.group import Shape
from elastic.cluster.fleet.groups.targets import sharded
from elastic.cluster.fleet.groups.transition import Books
from elastic.engines.core.kv_state import KVFormat
from elastic.engines.pipeline.path import LayerPath
from elastic.planning.arrangement.caps import largest_caps


def largest_instances(
    rooms: Mapping[str, Room], formats: Mapping[str, KVFormat], degrees: Sequence[int]
) -> dict[str, dict[int, int]]:
    """Return `blocks_by_degree` of each rank; ranks with the same memory have the same, which is planned once."""
    by_room: dict[tuple[Room, KVFormat], dict[int, int]] = {}
    by_rank = {}
    for name, format in formats.items():
        room = rooms[name]
        path = LayerPath.alone("", room.path.layers, room.path.shards)
        key = replace(room, path=path, committed_sectors=0, held_bytes=(), step_s=0.0), format
        if key not in by_room:
            by_room[key] = blocks_by_degree(*key, degrees)
        by_rank[name] = dict(by_room[key])
    return by_rank


def blocks_by_degree(room: Room, format: KVFormat, degrees: Iterable[int]) -> dict[int, int]:
    """Return the blocks of one instance by the number of ranks, all with the memory of this one, that share its layers.

    Degrees for which its layers are not cut are left out.
    """
    blocks = {}
    for degree in degrees:
        if room.path.shards % degree == 0:
            names = [str(number) for number in range(degree)]
            paths = {name: LayerPath.alone(name, room.path.layers, room.path.shards) for name in names}
            now = Shape(paths, dict.fromkeys(names, room.resident))
            apart = replace(now, weights=dict.fromkeys(names, frozenset(range(len(room.path.ranks)))))
            books = Books(dict.fromkeys(names, room), format, now)
            blocks[degree] = _reachable(books, sharded(apart, [names]), names[0]) * load_blocks(room, format)
    return blocks


def note_reach(dispatcher: Dispatcher, shape: Shape, rooms: Mapping[str, Room]) -> None:
    """Have the instances of a group know the highest limits that its caps allow, one after another.

    `rooms` are as the ranks have them in this shape.
    """
    with dispatcher.lock:
        for home, instance in dispatcher.present(shape.members).items():
            books = Books(rooms, instance.kv_format, shape)
            instance.group_blocks = _reachable(books, shape, home) * load_blocks(rooms[home], instance.kv_format)


def _reachable(books: Books, shape: Shape, home: str) -> int:
    """Return the sectors that an instance could have in a shape, if the others of it had none."""
    most = {name: room.most_sectors for name, room in books.rooms.items()}
    return largest_caps(shared_memory(books, shape), most)[home]
