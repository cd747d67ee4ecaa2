"""The memory that must remain to be had so that all live requests can end, one after another, and none is evicted.

The banker's algorithm (Dijkstra, 1965): requests say beforehand how much they will need at the most, and a block is
given only if afterwards there is still an order in which each can have all it needs, if those before it have ended and
given theirs back. With one resource, the order by what is still needed finds one if there is any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True)
class RequestDemand:
    """The blocks of one request, by group."""

    held: tuple[int, ...]
    """Those that it alone has: they come free when it ends."""
    needed: tuple[int, ...]
    """Those that it may still ask for."""
    shared: tuple[frozenset[int], ...] = ()
    """Ids of those that it has together with others: they come free when the last of these ends."""


def reserved_sectors(
    demands: Sequence[RequestDemand], free_blocks: Sequence[int], blocks_per_sector: Sequence[int]
) -> int:
    """Count the sectors that must be to be had beside `free_blocks`, blocks of each group in allocated sectors.

    A group keeps the sectors that it got, so the sum over groups is more than enough where there are several.
    """
    total = 0

    def needed_sectors(demand: RequestDemand) -> float:
        return sum(count / size for count, size in zip(demand.needed, blocks_per_sector, strict=True))

    order = sorted(demands, key=needed_sectors)
    for group, (free, size) in enumerate(zip(free_blocks, blocks_per_sector, strict=True)):
        returned, most = 0, 0
        sharers = Counter(chain.from_iterable(demand.shared[group] for demand in order if demand.shared))
        for demand in order:
            most = max(most, demand.needed[group] - returned)
            returned += demand.held[group]
            for block in demand.shared[group] if demand.shared else ():
                sharers[block] -= 1
                returned += not sharers[block]
        total += -(-max(0, most - free) // size)
    return total
