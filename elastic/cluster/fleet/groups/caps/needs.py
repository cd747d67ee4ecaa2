"""What the instances of a group need of its memory: as ranks measure it, and as the fleet knows of their requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from elastic.cluster.control.stage_questions import Room
from elastic.cluster.fleet.dispatcher import Dispatcher
from elastic.cluster.fleet.groups.transition import Books, Shape
from elastic.cluster.fleet.instance import Instance, all_blocks
from elastic.cluster.fleet.records.requests import RequestRecord
from elastic.planning.arrangement.caps import Need, SharedMemory

NEARLY = 0.1
"""An instance is short when requests wait at it, and when so small a share of its blocks is left."""


def is_short(dispatcher: Dispatcher, members: Iterable[str]) -> bool:
    """Return whether an instance may need more blocks than it may have, as they said last."""
    with dispatcher.lock:
        there = [dispatcher.instances[name] for name in members if name in dispatcher.instances]
        return bool(dispatcher.queue) or any(map(_is_short, there))


def needs_of(dispatcher: Dispatcher, rooms: Mapping[str, Room]) -> dict[str, Need]:
    """Return the needs of instances, of which these rooms were measured, in sectors.

    Who is next of the requests that wait at the fleet counts for the instance that has most blocks left: all of them
    together may have the room that it needs, and none alone.
    """
    with dispatcher.lock:
        there = {name: dispatcher.instances[name] for name in rooms if name in dispatcher.instances}
        emptiest = max(there, key=lambda name: there[name].free_blocks) if dispatcher.queue and there else None
        needs = {}
        for name, room in rooms.items():
            records = list(there[name].records.values()) if name in there else []
            if name == emptiest:
                records.append(dispatcher.queue[0])
            short = name in there and (name == emptiest or _is_short(there[name]))
            needs[name] = Need(room.committed_sectors, _sectors(there, name, records, room), room.most_sectors, short)
        return needs


def shared_memory(books: Books, shape: Shape, caps: Mapping[str, int] | None = None) -> SharedMemory:
    """Return the memory that instances of a shape share; with `caps` less room for a layer more of who has most."""
    none = dict.fromkeys(shape.paths, 0)
    kept = books.staging(caps) if caps is not None else dict.fromkeys(books.pages, 0)
    return SharedMemory(
        {rank: books.free(rank, shape, none) - kept[rank] for rank in books.pages},
        {
            rank: {home: books.sector_pages(rank, layers) for home, layers in shape.layers_at(rank).items()}
            for rank in books.pages
        },
    )


def _is_short(instance: Instance) -> bool:
    load = instance.load
    return load.waiting > 0 or load.free_blocks <= NEARLY * load.total_blocks


def _sectors(there: Mapping[str, Instance], name: str, records: Sequence[RequestRecord], room: Room) -> int:
    """Count the sectors that requests of an instance may need; groups of layers of several sizes: by the smallest."""
    if not records:
        return 0
    kv = there[name].kv_format
    blocks = sum(all_blocks(kv, record) for record in records)
    return -(-blocks // max(1, min(room.sector_pages) * room.page_bytes // kv.block_bytes))
