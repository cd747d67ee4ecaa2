"""The caps of a group follow what its requests need, and the memory that there is."""

from __future__ import annotations

from elastic.cluster.fleet.groups.caps.change import CapChange
from elastic.cluster.fleet.groups.caps.needs import blocks_told, is_short, needs_of, shared_memory
from elastic.cluster.fleet.groups.caps.reach import note_reach
from elastic.cluster.fleet.groups.exchange import keeps_staging
from elastic.cluster.fleet.groups.group import Deadline, Group
from elastic.cluster.fleet.groups.ranks import Ranks
from elastic.cluster.fleet.groups.transition import Books
from elastic.planning.arrangement.caps import better_caps, fitting_caps, largest_caps

FOLLOW_S = 1.0
"""How long requests may take to fit in a cap that is lowered for others; a verb waits for no more than that."""


def follow(ranks: Ranks, group: Group) -> bool:
    """Share the memory of a group out anew if an instance is short, or has lost room; return whether caps changed.

    What one keeps for layers of others counts as used there. Where a limit was lowered below that, nothing would be
    left for its own requests, and nobody would begin them: caps fall until all has room.
    """
    dispatcher, members = ranks.dispatcher, group.members
    if group.shape.apart:
        return False
    lost_room = any(group.told.get(name, 0) > blocks for name, blocks in blocks_told(dispatcher, members).items())
    if not lost_room and not is_short(dispatcher, members):
        return False
    caps = _wanted(ranks, group)
    done = caps is not None and CapChange(ranks, group, Deadline(FOLLOW_S)).share_out(caps)
    if done or caps is None:
        group.told = blocks_told(dispatcher, members)
    return done


def _wanted(ranks: Ranks, group: Group) -> dict[str, int] | None:
    """Return other caps that are better, or that fit where those of now do not; None: these stay."""
    shape, now = group.shape, group.caps_in_force()
    rooms = ranks.measure(group.members)
    note_reach(ranks.dispatcher, shape, rooms)
    books = Books(rooms, ranks.instance(group.members[0]).kv_format, shape)
    shares = books.caps(shape, staging=(staging := keeps_staging(ranks, group)))
    memory, needs = shared_memory(books, shape), needs_of(ranks.dispatcher, rooms, now)
    if (fitting := fitting_caps(memory, needs, shares, now)) is not None:
        return fitting
    kept = shared_memory(books, shape, shares) if staging else memory
    most = largest_caps(kept, {home: need.most for home, need in needs.items()})
    tight = any(need.largest > most[home] for home, need in needs.items())  # that needs what is kept for a layer more
    return better_caps(memory if tight else kept, needs, shares, now)
