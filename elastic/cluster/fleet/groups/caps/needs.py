"""What the instances of a group need of its memory: as ranks measure it, and as the fleet knows of their requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from elastic import clock
from elastic.cluster.control.stage_questions import Room
from elastic.cluster.fleet.dispatcher import Dispatcher
from elastic.cluster.fleet.groups.group import Shape
from elastic.cluster.fleet.groups.transition import Books
from elastic.cluster.fleet.instance import Instance, all_blocks
from elastic.cluster.fleet.planning.starvation import waited_s, waiting_blocks
from elastic.cluster.fleet.records.requests import RequestRecord
from elastic.engines.core.kv_state import KVFormat
from elastic.planning.arrangement.caps import Need, SharedMemory

NEARLY = 0.1
"""An instance is short when requests wait at it, and when so small a share of its blocks is left."""


def is_short(dispatcher: Dispatcher, members: Collection[str]) -> bool:
    """Return whether an instance may need more blocks than it may have, as they said last.

    A request that waits although there are blocks for it waits for something else.
    """
    with dispatcher.lock:
        there = dispatcher.present(members).values()
        first = dispatcher.next_for(members)
        if first is not None and all(all_blocks(each.kv_format, first) > each.free_blocks for each in there):
            return True
        loads = [(each.load, sum(waiting_blocks(each))) for each in there]
    return any(load.free_blocks <= NEARLY * load.total_blocks or waiting > load.free_blocks for load, waiting in loads)


def blocks_told(dispatcher: Dispatcher, members: Collection[str]) -> dict[str, int]:
    """Return the blocks that instances could have with nothing there, as they said last."""
    with dispatcher.lock:
        return {name: instance.load.total_blocks for name, instance in dispatcher.present(members).items()}


def needs_of(dispatcher: Dispatcher, rooms: Mapping[str, Room], caps: Mapping[str, int]) -> dict[str, Need]:
    """Return the needs of instances, of which these rooms were measured, in sectors; `caps` are those in force.

    Who is next of the requests that wait at the fleet counts for the instance that has most blocks left: all of them
    together may have the room that it needs, and none alone.
    """
    with dispatcher.lock:
        there = dispatcher.present(rooms)
        first = dispatcher.next_for(there)
        emptiest = max(there, key=lambda name: there[name].free_blocks) if first is not None and there else None
        needs = {}
        for name, room in rooms.items():
            needs[name] = Need(room.committed_sectors, 0, room.most_sectors)
            if (instance := there.get(name)) is not None:
                needs[name] = _need(instance, room, caps[name], first if name == emptiest else None)
        return needs


def shared_memory(books: Books, shape: Shape, caps: Mapping[str, int] | None = None) -> SharedMemory:
    """Return the memory that instances of a shape share; with `caps` less room for a layer more of who has most."""
    none = dict.fromkeys(shape.paths, 0)
    free = {rank: books.free(rank, shape, none) for rank in books.pages}
    if caps is not None:
        free = {rank: pages - max(caps.values()) * books.layer_pages(rank) for rank, pages in free.items()}
    return SharedMemory(
        free,
        {
            rank: {home: books.sector_pages(rank, shards) for home, shards in shape.shards_at(rank).items()}
            for rank in books.pages
        },
    )


def _need(instance: Instance, room: Room, cap: int, own: RequestRecord | None) -> Need:
    """Return the needs of one instance; `own`: who waits at the fleet and counts for it.

    Room and cap are of now; what the instance said last may be of before its cap changed.
    """
    kv, records = instance.kv_format, [*instance.records.values(), *([own] if own is not None else [])]
    committed, size = room.committed_sectors, load_blocks(room, kv)
    wanted = _sectors(sum(all_blocks(kv, record) for record in records), size, kv)
    waiting = waiting_blocks(instance)
    lacking = sum(waiting) + (all_blocks(kv, own) if own is not None else 0)
    short = cap - committed <= NEARLY * cap or committed + _sectors(lacking, size, kv) > cap
    largest = 0
    if own is not None and not instance.fits_alone(own.request):
        largest = -(-instance.request_blocks(own.request) // size)
    first = min(wanted, committed + _sectors(waiting[0], size, kv)) if waiting else 0
    waits_s = waited_s(instance, clock.now())
    return Need(committed, wanted, room.most_sectors, short, largest, first, waits_s)


def _sectors(blocks: int, size: int, kv: KVFormat) -> int:
    """Count the sectors of so many blocks; each further group of layers may have one that is not full."""
    return -(-blocks // size) + (len(kv.groups) - 1 if blocks else 0)


def load_blocks(room: Room, kv: KVFormat) -> int:
    """Count the blocks of a sector as loads and limits of instances have them: of the first group of layers."""
    (first, *_), _ = kv.groups[0]
    return max(1, room.sector_pages[first] * room.page_bytes // kv.block_bytes)
