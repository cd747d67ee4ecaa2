"""What others are told of an engine: how much it has to do, where its KV cache lies, and what changes of that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from elastic.engines.continuous.ranks.home_kv import HomeKV
from elastic.engines.continuous.step_loop import StepLoop
from elastic.engines.core.kv_journal import KVJournal
from elastic.engines.core.kv_state import KVReport, KVSource
from elastic.engines.core.load import EngineLoad
from elastic.engines.pipeline.home import HomeExecutor
from elastic.types import RankMemory


@dataclass(frozen=True)
class KVHeadroom:
    """What the KV memory of an engine's place could hold, in pages and sectors, at the limit that is in force."""

    pages: int
    """For the engine, and for other instances whose layers are computed here."""
    page_bytes: int
    sector_pages: tuple[int, ...]
    """Of each layer, or part of its KV heads, wherever it is, the pages of a sector in it."""
    sectors: int
    """For which there are addresses."""
    committed: int
    """Sectors that live requests have, and are promised."""
    held_bytes: tuple[int, ...]
    """Of each layer, or part of its KV heads, the bytes of blocks that requests have, or that are kept for reuse."""


class EngineReports:
    """What is asked may be asked from any thread; what changes is told on the thread of the engine's loop."""

    def __init__(self, loop: StepLoop, home: HomeExecutor, kv: HomeKV) -> None:
        self.on_step: Callable[[KVReport | None], None] | None = None
        """Set before the engine starts: told what has changed after each step, once its outputs were told and before
        any block that came free has another owner; the loop's thread waits for it. None while layers change their rank,
        or have copies: then nobody can go on from what is here."""
        self.on_room: Callable[[], object] | None = None
        """Set before the engine starts: told when blocks came free behind what `on_step` was told, and no step follows
        with which that could be told."""
        self.shares_prefixes = loop.scheduler.blocks.shares
        """Whether sequences share the blocks of a common beginning."""
        self._loop, self._home, self._kv = loop, home, kv
        self._load = EngineLoad()

    def kv_source(self) -> KVSource:
        """Say where others can read the KV cache: processes of the host, unless it is a GPU's, and ranks."""
        pool, rank = self._kv.memory.kv.pool, self._home.rank
        file = pool.backend.shared_file()
        return KVSource(file, pool.page_bytes, self._kv.exchange.format, memory=RankMemory(rank, pool.name))

    def load(self) -> EngineLoad:
        """Return how much there is to do; of before, where somebody moves memory just now. It never waits."""
        memory, scheduler, error = self._kv.memory, self._loop.scheduler, self._loop.lost
        steps, lost = scheduler.steps, error.rank if error is not None else ""
        if not memory.lock.acquire(blocking=False):
            return replace(self._load, steps=steps, lost_rank=lost)
        try:
            total, uncapped = (sectors * memory.blocks_per_sector(0) for sectors in (memory.capacity, memory.uncapped))
            blocks = scheduler.blocks
            running, waiting, free = len(blocks.live), len(blocks.waiting), blocks.free_blocks()
            self._load = EngineLoad(running, waiting, free, total, steps, lost, uncapped)
            return self._load
        finally:
            memory.lock.release()

    @property
    def sector_blocks(self) -> tuple[int, ...]:
        """The blocks of a sector, of each group of layers."""
        memory = self._kv.memory
        return tuple(memory.blocks_per_sector(group) for group in range(len(memory.groups)))

    def kv_room(self) -> KVHeadroom:
        """Return what the memory of the KV cache could hold."""
        memory, pages, held = self._kv.memory, dict[int, int](), dict[int, int]()
        with memory.lock:
            for ranges, pool in zip(memory.groups, self._loop.scheduler.blocks.pools, strict=True):
                pages |= dict.fromkeys(ranges.group.layers, ranges.layer_pages)
                held |= dict.fromkeys(ranges.group.layers, pool.held * ranges.group.block_bytes)
            return KVHeadroom(
                pages=memory.kv.limits.open,
                page_bytes=memory.kv.pool.page_bytes,
                sector_pages=tuple(pages[layer] for layer in sorted(pages)),
                sectors=memory.sectors,
                committed=memory.sectors_in_use + memory.promised(),
                held_bytes=tuple(held[layer] for layer in sorted(held)),
            )

    # -- what changes of the KV cache, on the loop's thread

    def begin(self) -> None:
        """Tell from now on what changes of the KV cache, first all that there is, unless that is told already.

        It is told of what is computed here alone: of the other layers only who computes them knows. Where layers have
        several copies nothing is: which of them a sequence goes by is not known elsewhere.
        """
        memory, scheduler, path = self._kv.memory, self._loop.scheduler, self._home.path
        if self.on_step is None or scheduler.journal is not None or path.copies > 1:
            return
        with memory.lock:
            memory.log = list(memory.mapped_sectors)
        journal = KVJournal(self.on_step, self._kv.mapped_since, scheduler.blocks.release, path.epoch)
        journal.note_computed(scheduler.sequences.values())
        scheduler.journal = journal
        self._loop.on_step, self._loop.on_room = None, self.on_room

    def end(self) -> None:
        """Tell that what was told of the KV cache means nothing any more, and nothing of it until `begin`."""
        scheduler = self._loop.scheduler
        journal, scheduler.journal = scheduler.journal, None
        if journal is not None:
            assert self.on_step is not None
            journal.stop(scheduler.sequences)
            self._kv.memory.log = None
            self._loop.on_step = partial(self.on_step, None)
