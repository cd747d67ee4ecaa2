"""What the instances of a group need of its memory: as ranks measure it, and as the fleet knows of their requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from elastic.cluster.control.stage_questions import Room
from elastic.cluster.fleet.dispatcher import Dispatcher
from elastic.cluster.fleet.groups.transition import Books, Shape
from elastic.cluster.fleet.instance import Instance, all_blocks, request_blocks
from elastic.cluster.fleet.records.requests import RequestRecord
from elastic.engines.core.kv_state import KVFormat
from elastic.planning.arrangement.caps import Need, SharedMemory

NEARLY = 0.1
"""An instance is short when requests wait at it, and when so small a share of its blocks is left."""


def is_short(dispatcher: Dispatcher, members: Collection[str]) -> bool:
    """Return whether an instance may need more blocks than it may have, as they said last."""
    with dispatcher.lock:
        there = [dispatcher.instances[name] for name in members if name in dispatcher.instances]
        return dispatcher.next_for(members) is not None or any(map(_is_short, there))


def needs_of(dispatcher: Dispatcher, rooms: Mapping[str, Room]) -> dict[str, Need]:
    """Return the needs of instances, of which these rooms were measured, in sectors.

    Who is next of the requests that wait at the fleet counts for the instance that has most blocks left: all of them
    together may have the room that it needs, and none alone.
    """
    with dispatcher.lock:
        there = {name: dispatcher.instances[name] for name in rooms if name in dispatcher.instances}
        first = dispatcher.next_for(there)
        emptiest = max(there, key=lambda name: there[name].free_blocks) if first is not None and there else None
        needs = {}
        for name, room in rooms.items():
            instance, own = there.get(name), [first] if first is not None and name == emptiest else []
            records = [*instance.records.values(), *own] if instance is not None else []
            short = instance is not None and (bool(own) or _is_short(instance))
            largest = max((_own_sectors(instance, record, room) for record in own if instance is not None), default=0)
            needs[name] = Need(
                room.committed_sectors, _sectors(instance, records, room), room.most_sectors, short, largest
            )
        return needs


def shared_memory(books: Books, shape: Shape, caps: Mapping[str, int] | None = None) -> SharedMemory:
    """Return the memory that instances of a shape share; with `caps` less room for a layer more of who has most."""
    none = dict.fromkeys(shape.paths, 0)
    kept = books.staging(caps) if caps is not None else dict.fromkeys(books.pages, 0)
    return SharedMemory(
        {rank: books.free(rank, shape, none) - kept[rank] for rank in books.pages},
        {
            rank: {home: books.sector_pages(rank, shards) for home, shards in shape.shards_at(rank).items()}
            for rank in books.pages
        },
    )


def _is_short(instance: Instance) -> bool:
    load = instance.load
    return load.waiting > 0 or load.free_blocks <= NEARLY * load.total_blocks


def _sectors(instance: Instance | None, records: Sequence[RequestRecord], room: Room) -> int:
    """Count the sectors that requests of an instance may need; groups of layers of several sizes: by the smallest."""
    if instance is None or not records:
        return 0
    kv = instance.kv_format
    return -(-sum(all_blocks(kv, record) for record in records) // sector_blocks(room, kv))


def _own_sectors(instance: Instance, record: RequestRecord, room: Room) -> int:
    """Count the sectors that one answer of a request needs by itself, if the instance may not have so many now."""
    if instance.fits_alone(record.request):
        return 0
    kv = instance.kv_format
    return -(-request_blocks(kv, record.request) // sector_blocks(room, kv))


def sector_blocks(room: Room, kv: KVFormat) -> int:
    """Count the blocks of a sector, of the groups of layers the smallest."""
    return max(1, min(room.sector_pages) * room.page_bytes // kv.block_bytes)
