"""Baselines that evict: a request begins as soon as there are blocks for its tokens so far, and may lose them again.

The library admits only what can end, and evicts nothing. These are the two ways that others go, over the same blocks
and steps, for comparison: where live sequences ask for more blocks than there are, the youngest loses its own.

- `recompute`: its keys and values are computed again from its tokens, before new requests, once there is room (vLLM)
- `swap`: they go to memory of the host, and come back first in, first out, before new requests (InferCept)

Against thrashing whoever begins, or goes on, leaves a free block for each sequence that lives, or `spare` of them. The
memory of the host is not of the budget.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from elastic.engines.core.block_manager import BlockManager
from elastic.engines.core.block_pool import BlockTable
from elastic.engines.core.sequence import Cohort
from elastic.engines.core.sequence import Sequence as LiveSequence
from elastic.engines.core.step import ScheduledChunk, Step
from elastic.sim.core.stretch import StretchingScheduler


class OptimisticBlocks(BlockManager):
    """Blocks for whoever asks first, with no promise of more."""

    spare = 1
    """Blocks that whoever begins, or goes on, leaves free for each sequence that lives."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.evicted: set[str] = set()
        """Sequences that have not ended, and had to give theirs back at some time."""
        super().__init__(*args, **options)

    def detach(self, sequence: str) -> BlockTable | None:
        """See `BlockManager`."""
        self.evicted.discard(sequence)
        return super().detach(sequence)

    def promised_sectors(self) -> int:
        """Promise nothing."""
        return 0

    def free_blocks(self) -> int:
        """Count the blocks that new sequences may have: none before those that were evicted."""
        with self.memory.lock:
            evicted_wait = not self.evicted.isdisjoint(self.waiting)
            return 0 if evicted_wait else max(0, self._free(0) - self.spare * len(self.live))

    def lack(self, wanted: Sequence[tuple[BlockTable, int]], spare: int = 0) -> bool:
        """Tell whether there are too few blocks for tables to hold so many tokens each, and to spare some."""
        with self.memory.lock:
            for group in range(len(self.pools)):
                needs = (self._blocks_for(tokens)[group] - len(table.blocks[group]) for table, tokens in wanted)
                if sum(max(0, count) for count in needs) + spare > self._free(group):
                    return True
            return False

    def admit(self, sequence: str, tokens: Sequence[int], most: int, *, share: bool, **named: bytes) -> int | None:
        """Give a sequence blocks for its first tokens, none of them shared; None if there is no room for it now."""
        with self.memory.lock:
            if self.lack([(self.tables[sequence], min(len(tokens), most))], spare=self.spare * len(self.live)):
                return None
            return super().admit(sequence, tokens, most, share=False, **named)

    def _free(self, group: int) -> int:
        pool = self.pools[group]
        return pool.free_blocks + pool.size * self.memory.room(growing=True)

    def _extend(self, table: BlockTable, tokens: int, *, growing: bool) -> bool:
        if self.lack([(table, tokens)]):
            return False
        wanted = [n - len(blocks) for n, blocks in zip(self._blocks_for(tokens), table.blocks, strict=True)]
        if not self._take(table, wanted):
            return False
        self._ledger.give(table.demand, wanted)
        table.capacity = -(-tokens // self.block_tokens) * self.block_tokens
        return True


class EvictingScheduler(StretchingScheduler):
    """Has the youngest sequence lose its blocks where others need them for their next tokens. For one cohort."""

    blocks: OptimisticBlocks
    evictions = 0

    def _add_live(
        self, cohort: Cohort, chunks: list[ScheduledChunk], sequences: list[LiveSequence], added: list[LiveSequence]
    ) -> int:
        while len(cohort) > 1 and self.blocks.lack(self._wanted(cohort)):
            live = {*cohort.decoding, *cohort.prefilling}
            self.stalled += 1
            self._evict(next(sequence for sequence in reversed(self.sequences.values()) if sequence in live))
            cohort.refused = True  # so that none begins in this step
        return super()._add_live(cohort, chunks, sequences, added)

    def _wanted(self, cohort: Cohort) -> list[tuple[BlockTable, int]]:
        """List the tables of the next step, and how many tokens each is to hold then."""
        budget = self.budget.tokens((sequence.computed for sequence in cohort.decoding), self._queue_of(cohort))
        wanted = []
        for sequence in (*cohort.decoding, *cohort.prefilling):
            count = min(budget, len(sequence.tokens) - sequence.computed)
            wanted.append((sequence.table, sequence.computed + count))
            budget -= count
        return wanted

    def _evict(self, sequence: LiveSequence) -> None:
        """Take the blocks of a sequence, of which no step is in flight."""
        self.evictions += 1
        sequence.cohort.remove(sequence)
        if sequence.known:
            self._removed.append(sequence.id)
        self.blocks.forget(sequence.id)
        self.blocks.evicted.add(sequence.id)
        self.blocks.announce([sequence.id], sequence.table.most_tokens)


class RecomputingScheduler(EvictingScheduler):
    """What was evicted is before all others in the queue, the oldest first."""

    def _evict(self, sequence: LiveSequence) -> None:
        super()._evict(sequence)
        sequence.restart(self.blocks.tables[sequence.id])
        self._waiting.appendleft(sequence)


class SwappingScheduler(EvictingScheduler):
    """What was evicted is in memory of the host, in the order in which it came there."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._swapped: deque[tuple[LiveSequence, Any]] = deque()  # with what was kept; some may have ended

    def schedule(self) -> Step | None:
        """Choose the next step, behind what comes back from the host."""
        while self._swapped and self._swap_in(*self._swapped[0]):
            self._swapped.popleft()
        return super().schedule()

    def alike_steps(self, ends: dict[str, int]) -> int:
        """Return how many steps are alike: none while somebody waits at the host."""
        return 0 if self._swapped else super().alike_steps(ends)

    def to_host(self, sequence: LiveSequence) -> Any:
        """Copy the keys and values of a sequence to the host; return what `from_host` needs."""
        self.copied += sequence.computed

    def from_host(self, sequence: LiveSequence, kept: Any) -> None:
        """Copy them back, into other blocks."""
        self.copied += sequence.computed

    def _step_of(self, cohort: Cohort, now: float) -> Step | None:
        if not self._swapped:
            return super()._step_of(cohort, now)
        waiting, self._waiting = self._waiting, deque()  # new ones come after those that were evicted
        try:
            return super()._step_of(cohort, now)
        finally:
            self._waiting = waiting

    def _evict(self, sequence: LiveSequence) -> None:
        kept = self.to_host(sequence)
        super()._evict(sequence)
        computed = sequence.computed
        sequence.restart(self.blocks.tables[sequence.id])
        sequence.computed = computed
        self._swapped.append((sequence, kept))

    def _swap_in(self, sequence: LiveSequence, kept: Any) -> bool:
        """Give a sequence blocks with what was in them; return whether it needs to be swapped in no more."""
        if sequence.ended:
            return True
        count = sequence.computed
        if self.blocks.admit(sequence.id, sequence.tokens[:count], count, share=False) is None:
            return False
        self.from_host(sequence, kept)
        self._placed.append(sequence)
        return True


SCHEDULERS: dict[str, type[StretchingScheduler]] = {
    "none": StretchingScheduler,
    "recompute": RecomputingScheduler,
    "swap": SwappingScheduler,
}
"""By what is done with sequences where blocks run out."""
