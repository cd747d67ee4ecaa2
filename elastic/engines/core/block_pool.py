"""The blocks of one group of layers, in the sectors of memory that it has: free, kept for reuse, or in a table."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

from elastic.engines.core.admission import Demand
from elastic.engines.core.prefix_cache import PrefixCache, block_hash
from elastic.errors import IntegrityError

NEVER = (-1, 0, 0)
"""Of `BlockTable.refused`: no blocks were."""
BlockMoves = tuple[dict[int, int], ...]
"""By group of layers: blocks, and those that are to have what is in them."""


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one sequence, by group of layers: block i holds its tokens from i * block_tokens on.

    In a group with a sliding window the token at position p is in slot p modulo the window.
    """

    most_tokens: int
    """The most that it will ever hold."""
    blocks: tuple[list[int], ...]
    demand: Demand
    """What it still needs; of the ledger while it has a block."""
    capacity: int = 0
    """Tokens for which it has blocks."""
    salt: bytes = b""
    """Sequences share blocks with those that have the same."""
    form: bytes = b""
    """The name of the weights that compute what is behind its first `exact_blocks`; empty: the full ones, all of it."""
    exact_blocks: int = 0
    private: bool = False
    """Whether others share no further blocks of it: nobody knows by which weights they are computed."""
    hashes: list[bytes] = field(default_factory=list)
    """Of its first full blocks, as far as they are known."""
    shared: int = 0
    """How many of its blocks others may share."""
    refused: tuple[int, int, int] = NEVER
    """When blocks were last refused because not all could end then: `BlockManager._version`, the room that there was,
    the blocks that it wanted."""

    def use_salt(self, salt: bytes) -> None:
        """Share blocks with other sequences than before: those that the full weights compute, none if others have."""
        if salt != self.salt or self.form:
            self.private |= bool(self.form and self.capacity)
            self.salt, self.form = salt, b""
            self.hashes.clear()

    def use_form(self, form: bytes, exact_blocks: int) -> None:
        """Have blocks behind the first ones be of weights of another form."""
        self.form, self.exact_blocks = form, exact_blocks
        del self.hashes[exact_blocks:]

    def name_of(self, block: int, tokens: Sequence[int], size: int) -> bytes:
        """Return the hash of one of its full blocks, of `size` tokens each."""
        while len(self.hashes) <= block:
            number = len(self.hashes)
            parent = self.hashes[-1] if number else self.salt
            if self.form and number == self.exact_blocks:
                parent = blake2b(self.form, digest_size=16, key=parent).digest()
            self.hashes.append(block_hash(parent, tokens[number * size : (number + 1) * size]))
        return self.hashes[block]


@dataclass
class BlockCompaction:
    """What is in use moves to as few sectors as hold it: where it was is in use, too, until the `end`."""

    pools: Sequence[BlockPool]
    """Of each group."""
    tables: Mapping[BlockTable, Any]
    """Of all that have blocks."""
    users: Sequence[dict[int, Any]]
    """Of each group: what is noted of blocks."""
    moves: BlockMoves = field(init=False)

    def __post_init__(self) -> None:
        self.moves = tuple(pool.find_closer() for pool in self.pools)
        self._left: list[list[int]] = [[*of.values()] for of in self.moves]

    def move(self) -> None:
        """Have tables have the blocks that were taken, of which each has now what is in the one of before."""
        for group, (pool, noted, of) in enumerate(zip(self.pools, self.users, self.moves, strict=True)):
            for table in self.tables:
                table.blocks[group][:] = [of.get(block, block) for block in table.blocks[group]]
            for block, to in of.items():
                pool.prefixes.rename(block, to)
                if block in noted:
                    noted[to] = noted.pop(block)
        self._left = [[*of] for of in self.moves]

    def end(self) -> None:
        """Have those come free that nobody has: of before, or, if nothing moved, those that were taken."""
        for pool, blocks in zip(self.pools, self._left, strict=True):
            for block in blocks:
                pool.release(block)


class SectorMemory(Protocol):
    """Memory in sectors, as `kvcache.storage.paged.BlockMemory` has it."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Re-entrant; held by whoever asks for more than one thing at once."""

    @property
    def used_sectors(self) -> int:
        """Sectors that live sequences need."""

    @property
    def reusable_limit(self) -> int:
        """Sectors that may stay allocated for reuse alone while there is room for others."""

    def blocks_per_sector(self, group: int) -> int:
        """Count the blocks that a sector has in each layer of a group."""

    def room(self, *, growing: bool) -> int:
        """Count the sectors that could be allocated now: for sequences that live (`growing`), or for new ones."""

    def require_possible(self, sectors: int, what: str) -> None:
        """Raise `CapacityError` if so many are never to be had, `Overloaded` if not while the limit is as it is."""

    def allocate(self, group: int) -> int:
        """Return the number of one more sector. Raises `CapacityError`, and nothing has changed."""

    def free(self, group: int, sector: int) -> None:
        """Take a sector back."""


class _Sector:
    """A sector that the group has."""

    __slots__ = ("free", "in_use", "kept")

    def __init__(self, blocks: range) -> None:
        self.free = list(reversed(blocks))
        self.kept: dict[int, None] = {}  # blocks, as a set in order
        self.in_use = 0


class BlockPool:
    """Guarded by the lock of the memory.

    A sector without a block in use is reusable: live sequences do not need it. Blocks are taken so that there are many
    such: first what is free or kept in sectors that are needed anyway.
    """

    def __init__(self, group: int, memory: SectorMemory) -> None:
        self.size = memory.blocks_per_sector(group)
        self.prefixes = PrefixCache()
        """What is in blocks that sequences may share: these are kept for reuse as they come free."""
        self._group, self._memory = group, memory
        self._sectors: dict[int, _Sector] = {}
        self._open: list[int] = []  # heap of sectors in use with free blocks, low ones first; some may have none left
        self._listed: set[int] = set()  # what is in it: once each, though sectors are given back and come again
        self._kept: dict[int, None] = {}  # blocks kept in sectors in use, the longest unused first
        self.reusable: dict[int, None] = {}
        """Sectors in which every block is free or kept for reuse, as a set in order: the longest unused first."""
        self.in_use = 0

    @property
    def free_blocks(self) -> int:
        """Count the blocks to be had, kept ones included, in sectors that live sequences need."""
        return (len(self._sectors) - len(self.reusable)) * self.size - self.in_use

    @property
    def held(self) -> int:
        """Count the blocks that are in use or kept for reuse."""
        return sum(self.size - len(sector.free) for sector in self._sectors.values())

    @property
    def kept_blocks(self) -> list[int]:
        """List the blocks that are kept for reuse."""
        return [block for sector in self._sectors.values() for block in sector.kept]

    def take(self) -> int:
        """Return one of the `free_blocks`, of which there are some; the last, those that are kept, the oldest first."""
        while self._open:
            number = self._open[0]
            sector = self._sectors.get(number)
            if sector is not None and sector.free and sector.in_use:
                return self._use(number, sector.free.pop())
            self._listed.remove(heapq.heappop(self._open))
        block = next(iter(self._kept))
        self.prefixes.forget(block)
        self.reuse(block)
        return block

    def take_reusable(self) -> int:
        """Return a block of the reusable sector that has been one for longest."""
        number = next(iter(self.reusable))
        sector = self._sectors[number]
        if not sector.free:
            block = next(iter(sector.kept))
            self.prefixes.forget(block)
            del sector.kept[block]
            sector.free.append(block)
        return self._use(number, sector.free.pop())

    def take_new(self) -> int:
        """Return a block of a new sector. Raises `CapacityError`, and nothing has changed."""
        number = self._memory.allocate(self._group)
        sector = self._sectors[number] = _Sector(range(number * self.size, (number + 1) * self.size))
        return self._use(number, sector.free.pop())

    def reuse(self, block: int) -> None:
        """Have a block that was kept be in use."""
        number = block // self.size
        self._kept.pop(block, None)
        del self._sectors[number].kept[block]
        self._use(number, block)

    def release(self, block: int) -> None:
        """Have a block that was in use be kept for reuse, or free."""
        number = block // self.size
        sector = self._sectors[number]
        self.in_use -= 1
        sector.in_use -= 1
        if block in self.prefixes.names:
            sector.kept[block] = self._kept[block] = None
        else:
            sector.free.append(block)
            self._list(number, sector)
        if not sector.in_use:
            for kept in sector.kept:
                del self._kept[kept]
            self.reusable[number] = None
            if not sector.kept:
                self._give_back(number)

    def find_closer(self) -> dict[int, int]:
        """Take blocks for those that have to move so that what is in use lies in as few sectors as hold it.

        Returns which they are, and for each the one that was taken for it: both are in use then. The fullest sectors
        stay as they are, but for what is kept for reuse in them.
        """
        used = [(number, sector) for number, sector in self._sectors.items() if sector.in_use]
        used.sort(key=lambda each: (-each[1].in_use, each[0]))
        stay, moves = -(-self.in_use // self.size), dict[int, int]()
        going = [block for number, sector in used[stay:] for block in self._blocks_in_use(number, sector)]
        for number, sector in used[:stay]:
            while going and (sector.free or sector.kept):
                if sector.free:
                    block = self._use(number, sector.free.pop())
                else:
                    block = next(iter(sector.kept))
                    self.prefixes.forget(block)
                    self.reuse(block)
                moves[going.pop()] = block
        return moves

    def give_up_reusable(self, count: int) -> None:
        """Forget what so many reusable sectors hold, the longest unused first, and give them back."""
        for number in list(self.reusable)[: max(0, count)]:
            self._give_back(number)

    def forget_kept(self) -> None:
        """Forget all that is kept for reuse; what comes free with it is given back."""
        self.give_up_reusable(len(self.reusable))
        for block in list(self._kept):
            self.prefixes.forget(block)
            sector = self._sectors[block // self.size]
            del self._kept[block], sector.kept[block]
            sector.free.append(block)
            self._list(block // self.size, sector)

    def check(self) -> None:
        """Recount; raises `IntegrityError`."""
        for number, sector in self._sectors.items():
            accounted = len(sector.free) + len(sector.kept) + sector.in_use
            if accounted != self.size:
                raise IntegrityError(f"sector {number} has {self.size} blocks, {accounted} of them are accounted for")
            if (number in self.reusable) is not (sector.in_use == 0):
                raise IntegrityError(f"sector {number} has {sector.in_use} blocks in use; is it reusable?")
            if sector.free and sector.in_use and number not in self._listed:
                raise IntegrityError(f"sector {number} has {len(sector.free)} free blocks that nobody would take")
        if sorted(self._open) != sorted(self._listed):
            raise IntegrityError(f"sectors {sorted(self._open)} are in order to be taken, noted {sorted(self._listed)}")
        in_use = sum(sector.in_use for sector in self._sectors.values())
        kept = {b for s in self._sectors.values() if s.in_use for b in s.kept}
        if in_use != self.in_use or kept != self._kept.keys():
            raise IntegrityError(f"{in_use} blocks are in use, counted {self.in_use}; kept {kept}, {set(self._kept)}")

    def _blocks_in_use(self, number: int, sector: _Sector) -> list[int]:
        others = {*sector.free, *sector.kept}
        return [block for block in range(number * self.size, (number + 1) * self.size) if block not in others]

    def _use(self, number: int, block: int) -> int:
        sector = self._sectors[number]
        self.in_use += 1
        sector.in_use += 1
        if sector.in_use == 1:  # what is kept in it counts among the blocks to be had now
            self.reusable.pop(number, None)
            self._kept.update(sector.kept)
            self._list(number, sector)
        return block

    def _list(self, number: int, sector: _Sector) -> None:
        if sector.free and number not in self._listed:
            self._listed.add(number)
            heapq.heappush(self._open, number)

    def _give_back(self, number: int) -> None:
        for block in self._sectors.pop(number).kept:
            self.prefixes.forget(block)
        del self.reusable[number]
        self._memory.free(self._group, number)
