"""Baselines that evict: a request begins as soon as there are blocks for its tokens so far, and may lose them again.

The library admits only what can end, and evicts nothing. These are the two ways that others go, over the same engine,
blocks and steps, for comparison: where live sequences ask for more blocks than there are, the youngest loses its own.

- `recompute`: its keys and values are computed again from its tokens, before new requests, once there is room (vLLM)
- `swap`: they go to memory of the host, and come back first in, first out, before new requests (InferCept)

Tuned against thrashing: whoever begins, or goes on, leaves a free block for each sequence that lives. The memory that
is swapped to is not of the budget, and on a CPU as fast as the cache's own: both are better than a GPU would have it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from elastic.cluster.fleet import instance
from elastic.cluster.fleet.records.requests import RequestRecord
from elastic.engines.continuous import engine as engine_module
from elastic.engines.continuous.engine import ContinuousEngine
from elastic.engines.core.block_manager import BlockManager, BlockTable
from elastic.engines.core.kv_state import KVFormat
from elastic.engines.core.restart import RestartingScheduler
from elastic.engines.core.sequence import Cohort
from elastic.engines.core.sequence import Sequence as LiveSequence
from elastic.engines.core.step import ScheduledChunk, Step

WAYS = ("recompute", "swap")


class OptimisticBlocks(BlockManager):
    """Blocks for whoever asks first, with no promise of more."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.evicted: set[str] = set()
        """Sequences that had to give theirs back at some time."""
        super().__init__(*args, **options)

    @property
    def evicted_wait(self) -> bool:
        """Whether one of them has none now."""
        return not self.evicted.isdisjoint(self._waiting)

    def promised_sectors(self) -> int:
        return 0

    def free_blocks(self) -> int:
        """Count the blocks that new sequences may have: none before those that were evicted."""
        with self.memory.lock:
            return 0 if self.evicted_wait else max(0, self._free(0) - self.running)

    def lack(self, wanted: Sequence[tuple[BlockTable, int]], spare: int = 0) -> bool:
        """Tell whether there are too few blocks for tables to hold so many tokens each, and to spare some."""
        with self.memory.lock:
            for group in range(len(self._pools)):
                needs = (self._blocks_for(tokens)[group] - len(table.blocks[group]) for table, tokens in wanted)
                if sum(max(0, count) for count in needs) + spare > self._free(group):
                    return True
            return False

    def admit(self, sequence: str, tokens: Sequence[int], most: int, *, share: bool, **named: bytes) -> int | None:
        with self.memory.lock:
            if self.lack([(self._tables[sequence], min(len(tokens), most))], spare=self.running):
                return None
            return super().admit(sequence, tokens, most, share=False, **named)

    def _free(self, group: int) -> int:
        pool = self._pools[group]
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


class EvictingScheduler(RestartingScheduler):
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
        self.blocks.evicted.add(sequence.id)
        self._leave_cohort(sequence)
        if sequence.known:
            self._removed.append(sequence.id)
        self.blocks.forget(sequence.id)
        self.blocks.announce([sequence.id], sequence.table.most_tokens)


class RecomputingScheduler(EvictingScheduler):
    """What was evicted is before all others in the queue, the oldest first."""

    def _evict(self, sequence: LiveSequence) -> None:
        super()._evict(sequence)
        sequence.restart(self.blocks.table(sequence.id))
        self._waiting.appendleft(sequence)


class SwappingScheduler(EvictingScheduler):
    """What was evicted is in memory of the host, in the order in which it came there."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._swapped: deque[tuple[LiveSequence, list[torch.Tensor]]] = deque()  # some may have ended

    def schedule(self) -> Step | None:
        while self._swapped and self._swap_in(*self._swapped[0]):
            self._swapped.popleft()
        return super().schedule()

    def _step_of(self, cohort: Cohort, now: float) -> Step | None:
        if not self._swapped:
            return super()._step_of(cohort, now)
        waiting, self._waiting = self._waiting, deque()  # new ones come after those that were evicted
        try:
            return super()._step_of(cohort, now)
        finally:
            self._waiting = waiting

    def _evict(self, sequence: LiveSequence) -> None:
        kept = [rows[blocks] for rows, blocks in self._rows(sequence)]
        super()._evict(sequence)
        computed = sequence.computed
        sequence.restart(self.blocks.table(sequence.id))
        sequence.computed = computed
        self._swapped.append((sequence, kept))

    def _swap_in(self, sequence: LiveSequence, kept: list[torch.Tensor]) -> bool:
        """Give a sequence blocks with what was in them; return whether it needs to be swapped in no more."""
        if sequence.ended:
            return True
        count = sequence.computed
        if self.blocks.admit(sequence.id, sequence.tokens[:count], count, share=False) is None:
            return False
        for (rows, blocks), values in zip(self._rows(sequence), kept, strict=True):
            rows[blocks] = values
        self._placed.append(sequence)
        return True

    def _rows(self, sequence: LiveSequence) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Give for each layer all blocks, [blocks, bytes], and which of them hold what is computed of a sequence."""
        memory: Any = self.blocks.memory
        for number, ranges in enumerate(memory.groups):
            nbytes, total = ranges.group.block_bytes, memory.sectors * memory.blocks_per_sector(number)
            blocks = torch.tensor(sequence.table.blocks[number])
            for layer in ranges.group.layers:
                yield ranges.view(layer, torch.uint8)[: total * nbytes].view(total, nbytes), blocks


SCHEDULERS = dict(zip(WAYS, (RecomputingScheduler, SwappingScheduler), strict=True))


def install(way: str) -> None:
    """Have engines that are made in this process from now on evict in one of the `WAYS`."""
    engine_module.BlockManager = OptimisticBlocks  # type: ignore[misc]
    engine_module.RestartingScheduler = SCHEDULERS[way]  # type: ignore[misc]
    ContinuousEngine._keep_journal = _tell_without_journal  # type: ignore[method-assign]


def _tell_without_journal(engine: ContinuousEngine) -> None:
    """Tell each step, but not where keys and values are: they come and go."""
    if engine.on_step is not None:
        engine._loop.on_step = partial(engine.on_step, None)


class Installed:
    """As the engine's option `step_budget`: no budget, but a rank that reads it installs one of the `WAYS`."""

    def __init__(self, way: str) -> None:
        self.way = way

    def __reduce__(self) -> tuple[Any, ...]:
        return install, (self.way,)


@contextmanager
def given_by_present_need() -> Iterator[None]:
    """Have fleets of this process give requests to instances that have blocks for their tokens so far."""

    def present_blocks(kv: KVFormat, record: RequestRecord) -> int:
        so_far = (len(record.request.prompt) + len(answer.tokens) + 1 for answer in record.live)
        return sum(instance.blocks_of(kv, tokens) for tokens in so_far)

    with (
        patch.object(instance, "all_blocks", present_blocks),
        patch.object(instance, "can_all_end", lambda *_: False),
    ):
        yield
