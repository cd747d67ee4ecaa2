"""Logical blocks of sequences: which ones each has, which are shared, and whether it may have more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from elastic.engines.core.admission import AdmissionLedger, Demand, Sharers, check_users
from elastic.engines.core.block_pool import NEVER, BlockCompaction, BlockPool, BlockTable, SectorMemory
from elastic.errors import CapacityError, Overloaded

NOBODY: Sharers = frozenset()
RETRY_AFTER_S = 1.0
"""For blocks that other sequences have now."""


class BlockManager:
    """The tables of all sequences that have not ended, over one engine's memory.

    A sequence is admitted, and a block given, only while all that live can still end one after another; the others
    wait. Guarded by the lock of the memory: used by the engine's thread, asked by the runtime's worker. `windows` has
    the sliding window of each group of layers, None for those that see every token; where there is one, no blocks are
    shared. `open_memory` opens the memory; it is given the answers to what the memory asks: `promised`, `reusable`
    and `give_up_reusable` (see `BlockMemory`).
    """

    def __init__(
        self,
        open_memory: Callable[..., SectorMemory],
        windows: Sequence[int | None],
        block_tokens: int,
        share_prefixes: bool = True,
    ) -> None:
        self.block_tokens = block_tokens
        self.shares = share_prefixes and all(window is None for window in windows)
        """Whether sequences share the blocks of a common beginning."""
        self.no_blocks: tuple[tuple[int, ...], ...] = ((),) * len(windows)
        self.windows = tuple(windows)
        self.tables: dict[str, BlockTable] = {}
        """Of the sequences that were announced, and not detached."""
        self.live: dict[BlockTable, None] = {}
        """Those with blocks, also of no sequence, as a set in order."""
        self.waiting: dict[str, int] = {}
        """The most tokens of the sequences that have no block yet."""
        self.pools: list[BlockPool] = []  # of each group
        self._promised: int | None = 0  # sectors; None: to be counted again
        self._version = 0  # of what could let a sequence have the blocks that it was refused, besides more room
        self._ledger = AdmissionLedger(())
        self.memory = open_memory(
            promised=self.promised_sectors, reusable=self.reusable_sectors, give_up_reusable=self.give_up_reusable
        )
        self._users: list[dict[int, Sharers]] = [{} for _ in windows]  # of blocks in use that may be shared
        self.pools = [BlockPool(group, self.memory) for group in range(len(windows))]
        self._ledger = AdmissionLedger([pool.size for pool in self.pools])

    # -- what any thread may call

    def expect(self, sequences: Sequence[str], tokens: int) -> None:
        """Announce sequences of so many tokens at the most each: weights leave the room that one needs alone.

        Raises `CapacityError` where one never fits, `Overloaded` where it does not while the limit is as it is.
        """
        with self.memory.lock:
            if any(sequence not in self.tables for sequence in sequences):
                self.require_possible(tokens)
                self.announce(sequences, tokens)

    def announce(self, sequences: Sequence[str], tokens: int) -> None:
        """Do the same for sequences that may not fit now."""
        with self.memory.lock:
            for sequence in sequences:
                if sequence not in self.tables:
                    self.tables[sequence] = self._new_table(tokens)
                    self.waiting[sequence] = tokens
            self._promised = None

    def blocks_of(self, table: BlockTable, tokens: int) -> tuple[tuple[list[int], list[int]], ...]:
        """Return, for each group, the blocks of a table that its first `tokens` tokens are in, and the others."""
        counts = self._blocks_for(tokens)
        return tuple((blocks[:n], blocks[n:]) for blocks, n in zip(table.blocks, counts, strict=True))

    def require_possible(self, tokens: int) -> None:
        """Raise `CapacityError` where a sequence never fits, `Overloaded` where it does not while the limit is so."""
        self.memory.require_possible(self._sectors_for(tokens), f"a request of {tokens} tokens")

    def forget(self, sequence: str) -> None:
        """End a sequence: its blocks are free, or kept for reuse. Unknown: nothing happens."""
        with self.memory.lock:
            table = self.detach(sequence)
            if table is not None:
                self.release(table)

    def promised_sectors(self) -> int:
        """Count the sectors that live sequences must still get, or the largest waiting one, alone."""
        if self._promised is None:
            live = self.owed_sectors()
            largest = self._sectors_for(max(self.waiting.values(), default=0))
            self._promised = max(live, largest - self.memory.used_sectors)
        return self._promised

    def owed_sectors(self) -> int:
        """Count the sectors that live sequences must still get, so that all can end."""
        return self._ledger.reserved_sectors([pool.free_blocks for pool in self.pools])

    def reusable_sectors(self) -> int:
        """Count the allocated sectors that hold only blocks kept for reuse."""
        return sum(len(pool.reusable) for pool in self.pools)

    def free_blocks(self) -> int:
        """Count the blocks of the first group that could be given to new sequences, after what live ones may need."""
        with self.memory.lock:
            sectors = max(0, self.memory.room(growing=False) - self.promised_sectors())
            spare = self.pools[0].free_blocks - self._ledger.reserved_blocks(0)
            return sectors * self.pools[0].size + max(0, spare)

    def fit_compacted(self, sectors: int) -> bool:
        """Return whether all live sequences could end in so many sectors, but only if their blocks lay closer."""
        with self.memory.lock:
            compacted = self._ledger.compacted_sectors([pool.in_use for pool in self.pools])
            return compacted <= sectors < self.memory.used_sectors + self.owed_sectors()

    @contextmanager
    def compaction(self) -> Iterator[BlockCompaction]:
        """Yield what moves blocks closer together, once what is in them was copied."""
        with self.memory.lock:
            compaction = BlockCompaction(self.pools, self.live, self._users)
        try:
            yield compaction
        finally:
            with self.memory.lock:
                compaction.end()
                self._promised = None
                self._version += 1

    def all_fit(self) -> bool:
        """Return whether there is room now for all that live sequences may still need, at the same time."""
        with self.memory.lock:
            return self._ledger.needed_sectors([p.free_blocks for p in self.pools]) <= self.memory.room(growing=True)

    def give_up_reusable(self, sectors: int) -> None:
        """Give up about so many of these."""
        for pool in self.pools:
            before = len(pool.reusable)
            pool.give_up_reusable(sectors)
            sectors -= before - len(pool.reusable)
        self._promised = None

    def forget_kept(self) -> None:
        """Forget all that is kept for reuse."""
        with self.memory.lock:
            for pool in self.pools:
                pool.forget_kept()
            self._promised = None
            self._version += 1

    def forget_names(self) -> None:
        """Have no block be found by what is in it any more, and forget what is kept for reuse."""
        with self.memory.lock:
            self.forget_kept()
            for pool in self.pools:
                pool.prefixes.clear()

    # -- what the scheduler calls

    def detach(self, sequence: str) -> BlockTable | None:
        """Forget a sequence, but have its blocks be in use until `release`."""
        with self.memory.lock:
            self.waiting.pop(sequence, None)
            self._promised = None
            return self.tables.pop(sequence, None)

    def release(self, table: BlockTable) -> None:
        """Have the blocks of a sequence that was detached be free, or kept for reuse. Can be called twice."""
        with self.memory.lock:
            if table in self.live:
                self._release(table)

    def admit(
        self, sequence: str, tokens: Sequence[int], most: int, *, share: bool, salt: bytes = b"", form: bytes = b""
    ) -> int | None:
        """Give a sequence without blocks those for its first tokens.

        They are those of `tokens` that others with the same `salt` have computed (`share`), and up to `most` after
        these. `form` names the weights that compute it; empty: the full ones, whose blocks all share, first of all.
        Returns how many there are of the former; None if there is no room for it now.
        """
        with self.memory.lock:
            table, room = self.tables[sequence], self.memory.room(growing=False)
            version, room_before, _ = table.refused
            if version == self._version and room <= room_before:
                return None
            table.refused = NEVER  # what it shares now was not there then: room is another
            table.use_salt(salt)
            cached = self._begin(table, tokens if share else (), form)
            if form != table.form:
                table.use_form(form, table.shared)
            if self._extend(table, min(len(tokens), cached + most), growing=False):
                del self.waiting[sequence]
                return cached
            refused = table.refused != NEVER
            self._release(table)
            table.refused = (self._version, room, 0) if refused else NEVER
            return None

    def reserve(
        self, most_tokens: int, tokens: Sequence[int], computed: int, like: BlockTable | None = None, alike: int = 0
    ) -> tuple[BlockTable, int]:
        """Give a sequence that may come the blocks for its first `computed` tokens; `attach` it, or `release` them.

        Until then they are in use, and what it may still need is promised, as for any that lives. It shares what is
        there of `tokens`, and the first `alike` blocks of another live one. Nobody else shares its own: what is in them
        is sure when it begins. Returns its table, and how many of its tokens are in blocks that it shares.
        Raises `CapacityError` where it never fits, `Overloaded` where it does not now; nothing has changed then.
        """
        with self.memory.lock:
            self.require_possible(most_tokens)
            table = self._new_table(most_tokens)
            cached = self._begin(table, tokens)
            if like is not None and self.shares and alike * self.block_tokens > cached:
                cached = self._share_with(table, like, alike)
            if not self._extend(table, max(cached, computed), growing=False):
                self._release(table)
                what = f"{computed} tokens of a request of {most_tokens} tokens"
                raise Overloaded(f"there are no blocks for {what} now", retry_after_s=RETRY_AFTER_S)
            return table, cached

    def attach(self, sequence: str, table: BlockTable) -> None:
        """Have blocks that were reserved be those of a sequence."""
        with self.memory.lock:
            self.tables[sequence] = table

    def grow(self, table: BlockTable, tokens: int) -> tuple[tuple[int, ...], ...] | None:
        """Give a live sequence the blocks for `tokens` tokens; return the new ones, None if it has to wait."""
        with self.memory.lock:
            before = [len(blocks) for blocks in table.blocks]
            if not self._extend(table, tokens, growing=True):
                return None
            return tuple(tuple(blocks[n:]) for blocks, n in zip(table.blocks, before, strict=True))

    def share_computed(self, table: BlockTable, tokens: Sequence[int], computed: int) -> None:
        """Let others share the blocks of a sequence that its first `computed` tokens have filled."""
        if table.private:
            return
        with self.memory.lock:
            for i in range(table.shared, computed // self.block_tokens):
                name = table.name_of(i, tokens, self.block_tokens)
                for pool, users, blocks in zip(self.pools, self._users, table.blocks, strict=True):
                    pool.prefixes.register(name, blocks[i])
                    if blocks[i] in pool.prefixes.names:
                        users.setdefault(blocks[i], frozenset((table.demand,)))
            table.shared = computed // self.block_tokens

    def check(self) -> None:
        """Recount; raises `IntegrityError`."""
        with self.memory.lock:
            for group, pool in enumerate(self.pools):
                pool.check()
                check_users(group, ((t.demand, t.blocks[group]) for t in self.live), self._users[group], pool.in_use)

    # -- inside, under the lock

    def _new_table(self, most_tokens: int) -> BlockTable:
        demand = Demand(self._blocks_for(most_tokens), [0] * len(self.windows))
        return BlockTable(most_tokens, tuple([] for _ in self.windows), demand)

    def _begin(self, table: BlockTable, tokens: Sequence[int], form: bytes = b"") -> int:
        """Have a table be of a live sequence; return how many of these tokens are in blocks that it shares now."""
        self.live[table] = None
        self._ledger.add(table.demand)
        return self._share_prefix(table, tokens, form) if self.shares else 0

    def _blocks_for(self, tokens: int) -> list[int]:
        most = (tokens if window is None else min(tokens, window) for window in self.windows)
        return [-(-count // self.block_tokens) for count in most]

    def _sectors_for(self, tokens: int) -> int:
        return sum(-(-n // pool.size) for n, pool in zip(self._blocks_for(tokens), self.pools, strict=True))

    def _prefix_blocks(self, table: BlockTable, tokens: Sequence[int], form: bytes) -> Iterator[list[int]]:
        """Give those that hold its first tokens, by group: of the full weights, then of those of a form."""
        for i in range((len(tokens) - 1) // self.block_tokens):
            blocks = self._find(table.name_of(i, tokens, self.block_tokens))
            if not blocks and form != table.form:
                table.use_form(form, i)
                blocks = self._find(table.name_of(i, tokens, self.block_tokens))
            if not blocks:
                return
            yield blocks

    def _find(self, name: bytes) -> list[int]:
        """Return the block of this hash in each group; empty where there is none in some."""
        blocks = [block for pool in self.pools if (block := pool.prefixes.blocks.get(name)) is not None]
        return blocks if len(blocks) == len(self.pools) else []

    def _share_prefix(self, table: BlockTable, tokens: Sequence[int], form: bytes) -> int:
        """Have a sequence share the blocks that hold its first tokens, but not its last; return how many tokens."""
        joined: dict[Sharers, Sharers] = {}  # so that blocks of the same users stay so
        for blocks in self._prefix_blocks(table, tokens, form):
            for group, block in enumerate(blocks):
                before = self._users[group].get(block, NOBODY)
                if not before:
                    self.pools[group].reuse(block)
                after = joined.get(before)
                if after is None:
                    after = joined[before] = before | {table.demand}
                self._users[group][block] = after
                self._ledger.share(group, before, after)
                table.blocks[group].append(block)
            table.shared += 1
        self._ledger.give(table.demand, [table.shared] * len(self.pools), alone=False)
        table.capacity = table.shared * self.block_tokens
        return table.capacity

    def _share_with(self, table: BlockTable, other: BlockTable, count: int) -> int:
        """Have a sequence share the first `count` blocks of another, which are full; return how many tokens."""
        more = count - len(table.blocks[0])
        for group, (users, blocks) in enumerate(zip(self._users, other.blocks, strict=True)):
            for block in blocks[count - more : count]:
                before = users.get(block, frozenset((other.demand,)))
                users[block] = before | {table.demand}
                self._ledger.share(group, before, users[block])
                table.blocks[group].append(block)
        self._ledger.give(table.demand, [more] * len(self.pools), alone=False)
        table.capacity = count * self.block_tokens
        return table.capacity

    def _extend(self, table: BlockTable, tokens: int, *, growing: bool) -> bool:
        """Give a sequence the blocks for `tokens` tokens if it may have them; return whether it has them."""
        wanted = [n - len(blocks) for n, blocks in zip(self._blocks_for(tokens), table.blocks, strict=True)]
        count = sum(wanted)
        if growing and not count:  # of one that comes, all that it may still need counts
            table.capacity = -(-tokens // self.block_tokens) * self.block_tokens
            return True
        room = self.memory.room(growing=growing)
        version, room_before, count_before = table.refused
        if version == self._version and room <= room_before and count >= count_before:
            return False
        self._ledger.give(table.demand, wanted)
        free = [pool.free_blocks - more for pool, more in zip(self.pools, wanted, strict=True)]
        safe = self._ledger.reserved_sectors(free) <= room
        table.refused = NEVER if safe else (self._version, room, count)
        if not safe or not self._take(table, wanted):
            self._ledger.give(table.demand, [-more for more in wanted])
            return False
        table.capacity = -(-tokens // self.block_tokens) * self.block_tokens
        self._promised = None
        self._version += len(self.pools) > 1  # with one kind of layers, what one gets is never of use to another
        return True

    def _take(self, table: BlockTable, wanted: Sequence[int]) -> bool:
        """Append so many blocks of each group to a table, or none; return whether there were so many."""
        taken: list[tuple[int, int]] = []
        try:
            for group, count in enumerate(wanted):
                for _ in range(count):
                    taken.append((group, self._take_block(self.pools[group])))
        except CapacityError:  # others were faster: the sequence waits
            for group, block in taken:
                self.pools[group].release(block)
            return False
        for group, block in taken:
            table.blocks[group].append(block)
        return True

    def _take_block(self, pool: BlockPool) -> int:
        """Take a block: of a reusable sector, what is kept in it is then given up, once enough is kept for reuse."""
        if pool.free_blocks:
            return pool.take()
        reusable = self.reusable_sectors()
        if pool.reusable and reusable >= min(self.memory.reusable_limit, self.memory.room(growing=True)):
            return pool.take_reusable()
        return pool.take_new()

    def _release(self, table: BlockTable) -> None:
        """Have none of the blocks of a table be its own; the last ones are the first that are given up."""
        demand = table.demand
        left: dict[Sharers, Sharers] = {}
        for group, (pool, users, blocks) in enumerate(zip(self.pools, self._users, table.blocks, strict=True)):
            for block in reversed(blocks):
                before = users.get(block)
                if before is None:
                    demand.held[group] -= 1
                    pool.release(block)
                    continue
                after = left.get(before)
                if after is None:
                    after = left[before] = before - {demand}
                self._ledger.share(group, before, after)
                if after:
                    users[block] = after
                else:
                    del users[block]
                    pool.release(block)
            demand.needed[group] += len(blocks)
            blocks.clear()
        self._ledger.remove(demand)
        del self.live[table]
        table.shared = table.capacity = 0
        self._promised = None
        self._version += 1
