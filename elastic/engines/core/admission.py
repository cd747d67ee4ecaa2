"""Which blocks may be given so that all live sequences can still end, one after another, and none is evicted.

The banker's algorithm (Dijkstra, 1965): sequences say beforehand how many blocks they will need at the most, and one is
given only if afterwards there is still an order in which each can have all it needs, if those before it have ended and
given theirs back. With one resource, the order by what is still needed finds one if there is any.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter, sub

from elastic.errors import IntegrityError


@dataclass(slots=True, eq=False)
class Demand:
    """The blocks of one live sequence, by group of layers."""

    needed: list[int]
    """Those that it may still ask for."""
    held: list[int]
    """Those that it alone has: they come free when it ends."""
    weight: int = field(default=0, init=False)
    """What it needs, in parts of sectors: the order in which sequences could end."""


Sharers = frozenset[Demand]


class AdmissionLedger:
    """Demands of all live sequences, in the order of what they need. Not thread-safe."""

    def __init__(self, blocks_per_sector: Sequence[int]) -> None:
        self._sizes = tuple(blocks_per_sector)
        whole = math.lcm(*self._sizes)
        self._weights = tuple(whole // size for size in self._sizes)
        self._order: list[Demand] = []
        self._shared: list[Counter[Sharers]] = [Counter() for _ in self._sizes]  # blocks by who has them together

    def add(self, demand: Demand) -> None:
        """Note a sequence that begins."""
        demand.weight = sum(count * weight for count, weight in zip(demand.needed, self._weights, strict=True))
        insort(self._order, demand, key=attrgetter("weight"))

    def remove(self, demand: Demand) -> None:
        """Forget a sequence."""
        self._order.remove(demand)

    def give(self, demand: Demand, blocks: Sequence[int], *, alone: bool = True) -> None:
        """Note that a sequence has so many blocks more of each group (below zero: fewer), which it has `alone`."""
        self._order.remove(demand)
        for group, count in enumerate(blocks):
            demand.needed[group] -= count
            demand.held[group] += count * alone
        self.add(demand)

    def share(self, group: int, before: Sharers, after: Sharers) -> None:
        """Note that one block has other users than before; none: it is in use no more, or was not."""
        for users, change in ((before, -1), (after, 1)):
            if len(users) == 1:
                (demand,) = users
                demand.held[group] += change
            elif users:
                self._shared[group][users] += change
                if not self._shared[group][users]:
                    del self._shared[group][users]

    def reserved_sectors(self, free_blocks: Sequence[int]) -> int:
        """Count the sectors that must be to be had so that all can end.

        `free_blocks` are those of each group in allocated sectors that live sequences need; below zero, so many are
        wanted besides. A group keeps the sectors that it got, so the sum over groups is more than enough where there
        are several.
        """
        groups = enumerate(zip(free_blocks, self._sizes, strict=True))
        return sum(-(-max(0, self.reserved_blocks(group) - free) // size) for group, (free, size) in groups)

    def compacted_sectors(self, in_use: Sequence[int]) -> int:
        """Count the sectors with which all can end if the blocks in use of each group lie in as few as hold them."""
        counts = [-(-count // size) for count, size in zip(in_use, self._sizes, strict=True)]
        free = [n * size - count for n, size, count in zip(counts, self._sizes, in_use, strict=True)]
        return sum(counts) + self.reserved_sectors(free)

    def needed_sectors(self, free_blocks: Sequence[int]) -> int:
        """Count the sectors that must be to be had so that all can have what they need at the same time."""
        needed = [sum(demand.needed[group] for demand in self._order) for group in range(len(self._sizes))]
        pairs = zip(needed, free_blocks, self._sizes, strict=True)
        return sum(-(-max(0, count - free) // size) for count, free, size in pairs)

    def reserved_blocks(self, group: int) -> int:
        """Count the blocks of a group that must be to be had so that all can end."""
        returned = [demand.held[group] for demand in self._order]
        if self._shared[group]:
            place = {demand: i for i, demand in enumerate(self._order)}
            for users, count in self._shared[group].items():
                returned[max(place[demand] for demand in users)] += count  # they come free with the last of these
        needed = [demand.needed[group] for demand in self._order]
        return max(map(sub, needed, accumulate(returned, initial=0)), default=0)


def check_users(
    group: int, tables: Iterable[tuple[Demand, Sequence[int]]], shared: Mapping[int, Sharers], in_use: int
) -> None:
    """Recount the users of a group's blocks: those whose tables have them. Raises `IntegrityError`.

    `shared` are the users of blocks that may be shared, `in_use` is how many blocks are counted.
    """
    tables, users = list(tables), dict[int, set[Demand]]()
    for demand, blocks in tables:
        for block in blocks:
            users.setdefault(block, set()).add(demand)
    if len(users) != in_use:
        raise IntegrityError(f"{in_use} blocks are in use, tables have {len(users)}")
    wrong = {block for block, those in shared.items() if users.get(block, set()) != those}
    wrong |= {block for block, those in users.items() if len(those) > 1 and block not in shared}
    if wrong:
        raise IntegrityError(f"the users of blocks {sorted(wrong)} are not those whose tables have them")
    for demand, blocks in tables:
        alone = sum(len(users[block]) == 1 for block in blocks)
        if demand.held[group] != alone:
            raise IntegrityError(f"a sequence alone has {alone} blocks, counted {demand.held[group]}")
