"""How much memory must remain to be had so that all live requests can end, one after another, and none is evicted.

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
    """One request: blocks by group."""

    held: tuple[int, ...]
    """That it alone has: they come free when it ends."""
    needed: tuple[int, ...]
    """That it may still ask for."""
    shared: tuple[frozenset[int], ...] = ()
    """Ids of those that it has together with others: they come free when the last of these ends."""


def reserved_sectors(
    claims: Sequence[RequestDemand], free_blocks: Sequence[int], blocks_per_sector: Sequence[int]
) -> int:
    """The sectors that must be to be had beside `free_blocks`, blocks of each group in sectors already allocated.

    A group keeps the sectors that it got, so the sum over groups is more than enough where there are several.
    """
    total = 0
    order = sorted(claims, key=lambda claim: _sectors(claim.needed, blocks_per_sector))
    for group, (free, size) in enumerate(zip(free_blocks, blocks_per_sector, strict=True)):
        returned, most = 0, 0
        sharers = Counter(chain.from_iterable(claim.shared[group] for claim in order if claim.shared))
        for claim in order:
            most = max(most, claim.needed[group] - returned)
            returned += claim.held[group]
            for block in claim.shared[group] if claim.shared else ():
                sharers[block] -= 1
                returned += not sharers[block]
        total += -(-max(0, most - free) // size)
    return total


def _sectors(blocks: Sequence[int], blocks_per_sector: Sequence[int]) -> float:
    return sum(count / size for count, size in zip(blocks, blocks_per_sector, strict=True))
