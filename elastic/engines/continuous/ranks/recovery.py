"""How an engine goes on when a rank that computed layers of it is lost: with what others still have of them.

Keys and values outlive the process that computed them where somebody holds its memory file open. They are copied as
they are; only sequences of which some are lost, or find no room here, are computed anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np

from elastic.engines.continuous.moves import MovingRequests
from elastic.engines.continuous.ranks.cohorts import Cohorts
from elastic.engines.continuous.ranks.home_kv import HomeKV
from elastic.engines.continuous.ranks.hosted_stages import HostedStages
from elastic.engines.continuous.ranks.joined_ranks import JoinedRanks
from elastic.engines.continuous.ranks.layer_exchange import LayerExchange
from elastic.engines.continuous.step_loop import StepLoop
from elastic.engines.core.kv_state import KVSource, LayersKV
from elastic.engines.core.sequence import Sequence
from elastic.engines.pipeline.home import HomeExecutor
from elastic.engines.pipeline.path import LayerPath
from elastic.errors import ElasticError, RankLost, StateError
from elastic.planning.sharding.numbers import by_layer
from elastic.runtime.runtime import Runtime

logger = logging.getLogger(__name__)
LAST_WORD_S = 5.0
"""How long is waited for what a rank had said before it was lost, and for what one that is there answers."""
Restore = Callable[[tuple[int, ...]], object]


class Recovery:
    """What a rank asks of its engine when another one is lost. Thread-safe; not for listeners."""

    def __init__(
        self,
        runtime: Runtime,
        loop: StepLoop,
        home: HomeExecutor,
        kv: HomeKV,
        stages: HostedStages,
        exchange: LayerExchange,
        ranks: JoinedRanks,
        cohorts: Cohorts,
        moves: MovingRequests,
    ) -> None:
        self._runtime, self._loop, self._home, self._kv, self._stages = runtime, loop, home, kv, stages
        self._exchange, self._ranks, self._cohorts, self._moves = exchange, ranks, cohorts, moves
        self._memory, self._scheduler = kv.memory, loop.scheduler

    @property
    def lost_rank(self) -> str | None:
        """The rank for whose loss no step is begun until `recover`; None: all is well."""
        lost = self._loop.lost
        return None if lost is None else lost.rank

    def recover(self, lost: str, restore: Restore, memories: Mapping[str, KVSource] | None = None) -> int:
        """Compute all layers here again, since a rank of the path was lost; return the tokens that are computed anew.

        Steps in flight are void, and the other ranks are told that it is over. `restore` is given the shards that come
        home and returns when their weights are here; if it raises, the engine waits for another `recover`.
        `memories` are those of ranks that are gone, where they can still be read: what lies there, and at ranks that
        are there, is copied. Sequences whose keys and values are not all found, or have no room here, are computed anew
        from their tokens; those that do not fit here at all leave, or fail (`MovingRequests.on_impossible`).
        """
        self._home.abort(ending=memories is None)

        def come_home() -> int:
            self._loop.settle_all()  # the steps in flight, which are void or not
            self._loop.lost = RankLost(f"rank {lost!r} was lost", rank=lost)
            undone, before = self._exchange.void(), self._home.path
            again = self._take_home(restore, memories) if undone or before.helpers else 0
            alone = LayerPath.alone(before.home, before.layers, before.shards)
            self._ranks.part(replace(alone, epoch=before.epoch + 1))
            if before.copies > 1:
                self._cohorts.share_out(1)
            self._memory.set_cap(None)
            self._moves.end_impossible(self._moves.on_impossible)
            self._loop.paused = False
            self._loop.lost = None
            return again

        return self._loop.between_steps(come_home)

    # -- inside, on the loop's thread; no step is in flight

    def _take_home(self, restore: Restore, memories: Mapping[str, KVSource] | None) -> int:
        """Have weights, keys and values of all layers here; return the tokens that are computed anew."""
        path = self._home.path
        away = tuple(sorted({shard % path.numbers for shard, rank in enumerate(path.ranks) if rank != self._home.rank}))
        kept = tuple(self._kept(copy, memories) for copy in range(path.copies))
        again = self._restart_lost(kept)
        try:
            restore(away)
            if self._scheduler.begun:
                self._memory.add_layers(self._kv.missing)
                for copy, sources in enumerate(kept):
                    self._copy_kept(copy, sources or {}, memories or {})
        except ElasticError as error:
            if not self._scheduler.begun:
                raise
            logger.warning("all requests of rank %s are computed anew: %s", self._home.rank, error)
            self._stages.free_kept()
            again += self._restart(None)
            restore(away)
        with self._memory.lock:
            self._memory.add_layers(self._kv.missing)
        self._kv.cache.refresh()
        self._clear_uncomputed()
        self._scheduler.keep()
        return again

    def _kept(self, copy: int, memories: Mapping[str, KVSource] | None) -> dict[str, LayersKV] | None:
        """Say where the keys and values of a copy are that lie elsewhere, by the rank; None: some are lost.

        Of those that several ranks have, one rank's are taken: rather of one that is there.
        """
        sources: dict[str, LayersKV] = {}
        path = self._home.path.of_copy(copy)
        wanted = self._kv.exchange.parts_of(shard for rank in path.helpers for shard in path.shards_of(rank))
        wanted -= self._kv.exchange.parts_of(path.shards_of(self._home.rank))
        if memories is None:
            return None if wanted else {}
        for rank in sorted(path.helpers, key=memories.__contains__):
            parts = self._kv.exchange.parts_of(path.shards_of(rank)) & wanted
            source = self._source(rank, parts, memories) if parts else None
            if source is not None:
                sources[rank] = source
                wanted -= parts
        return None if wanted else sources

    def _source(self, rank: str, parts: Collection[int], memories: Mapping[str, KVSource]) -> LayersKV | None:
        """Say where a rank has parts of the KV cache; None: it has gone, and nobody can read its memory."""
        if rank not in memories:
            told = self._home.still_at(rank, self._home.path.shards_of(rank), LAST_WORD_S)
            return None if told is None else replace(told, pages={part: told.pages[part] for part in sorted(parts)})
        sectors: dict[int, Mapping[int, tuple[int, ...]]] = {}
        for part in sorted(parts):
            sectors |= self._home.links[rank].located(self._memory.group_of(part), (part,), LAST_WORD_S)
        memory = memories[rank]
        return LayersKV(memory.file, memory.page_bytes, memory.format, sectors)

    def _restart_lost(self, kept: SequenceOf[Mapping[str, LayersKV] | None]) -> int:
        """Have sequences be computed anew that cannot go on, or have no room, the youngest first; return tokens.

        `kept` are the sources of each copy of the layers.
        """
        if not any(sources is not None for sources in kept):
            self._stages.free_kept()
            return self._restart(None)
        scheduler, memory = self._scheduler, self._memory
        lost = [sequence for sequence in scheduler.begun if not self._is_kept(sequence, kept)]
        again = self._restart({*lost, *scheduler.unkeepable()})
        pages, shards = self._runtime.shard_pages, self._home.path.shards  # below: what weights that are not here take
        every, dropped = frozenset(range(shards)), by_layer(self._runtime.dropped_shards, shards)
        weights = sum(pages[i].pages(every) - pages[i].pages(every - {*parts}) for i, parts in dropped.items())
        if memory.lacking(self._kv.missing) + weights > 0:
            self._stages.free_kept()
        while scheduler.begun and memory.lacking(self._kv.missing) + weights > 0:
            again += self._restart(scheduler.begun[-1:])
        return again

    def _is_kept(self, sequence: Sequence, kept: SequenceOf[Mapping[str, LayersKV] | None]) -> bool:
        """Return whether all that is computed of a sequence is here, or can be found."""
        sources = kept[sequence.cohort.copy]
        if sources is None:
            return False
        pages = {part: sectors for source in sources.values() for part, sectors in source.pages.items()}
        for group, (computed, _) in enumerate(self._scheduler.blocks.blocks_of(sequence.table, sequence.computed)):
            size, parts = self._memory.blocks_per_sector(group), self._memory.groups[group].group.layers
            sectors = {block // size for block in computed}
            if any(not sectors <= pages[part].keys() for part in parts if part in pages):
                return False
        return True

    def _restart(self, sequences: Collection[Sequence] | None) -> int:
        """Have sequences be computed anew, and no memory be kept that no other needs; return tokens."""
        again = self._scheduler.restart(sequences)
        self._memory.set_cap(0)
        self._memory.reached_cap()  # which gives back all sectors that are not in use
        return again

    def _copy_kept(self, copy: int, sources: Mapping[str, LayersKV], memories: Mapping[str, KVSource]) -> None:
        """Copy what a copy's sequences have elsewhere.

        Raises `StateError` where it cannot be read, or a rank has given it up meanwhile.
        """
        blocks = None if self._home.path.copies == 1 else self._computed_blocks(copy)
        for rank, source in sources.items():
            self._kv.exchange.copy(self._memory, source, source.pages, blocks, coordinated=False)
            if rank not in memories:
                after = self._source(rank, source.pages, {})
                if after is None or self._of_mapped(after) != self._of_mapped(source):
                    raise StateError(f"rank {rank!r} has given up keys and values while they were copied")

    def _computed_blocks(self, copy: int) -> list[list[int]]:
        """Return the blocks, by group, that hold what is computed of a copy's sequences."""
        scheduler = self._scheduler
        tables = [
            scheduler.blocks.blocks_of(sequence.table, sequence.computed)
            for sequence in scheduler.begun
            if sequence.cohort.copy == copy
        ]
        groups = range(len(self._memory.groups))
        return [sorted({block for table in tables for block in table[group][0]}) for group in groups]

    def _of_mapped(self, source: LayersKV) -> dict[int, dict[int, tuple[int, ...]]]:
        """Return where the sectors are that are mapped here: part of the KV cache -> sector -> pages."""
        mapped = [group.mapped for group in self._memory.groups]
        return {
            part: {sector: there for sector, there in sectors.items() if sector in mapped[self._memory.group_of(part)]}
            for part, sectors in source.pages.items()
        }

    def _clear_uncomputed(self) -> None:
        """Have blocks be as new ones that are behind what is computed of their sequence."""
        scheduler = self._scheduler
        for group in range(len(self._memory.groups)):
            behind = [
                block
                for sequence in scheduler.begun
                for block in scheduler.blocks.blocks_of(sequence.table, sequence.computed)[group][1]
            ]
            if behind:
                self._kv.cache.clear(group, np.array(behind, np.int64))
