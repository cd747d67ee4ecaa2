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

from elastic.engines.continuous.layer_exchange import LayerExchange
from elastic.engines.core.kv_state import KVSource, LayersKV
from elastic.engines.core.sequence import Sequence
from elastic.engines.pipeline.path import LayerPath
from elastic.errors import CapacityError, ElasticError, Overloaded, RankLost, StateError
from elastic.planning.sharding.numbers import by_layer
from elastic.runtime.runtime import Runtime

logger = logging.getLogger(__name__)
LAST_WORD_S = 5.0
"""How long is waited for what a rank had said before it was lost, and for what one that is there answers."""
Restore = Callable[[tuple[int, ...]], object]


class RecoveringEngine(LayerExchange):
    """What a rank asks of its engine when another one is lost. Thread-safe; not for listeners."""

    runtime: Runtime
    _cohorts: int | None  # while the layers have one copy; None: as many as their stages need
    on_impossible: Callable[[str, CapacityError], object] | None = None
    """Set before `start`: told, on the engine's thread, of a request that has left because it never fits here any more;
    other engines may go on with it. None: it fails."""
    on_crowded_out: Callable[[str, CapacityError], object] | None = None
    """The same, of one that left because other models have taken pages of the place since it came."""

    def recover(self, lost: str, restore: Restore, memories: Mapping[str, KVSource] | None = None) -> int:
        """Compute all layers here again, since a rank of the path was lost; return the tokens that are computed anew.

        Steps in flight are void, and the other ranks are told that it is over. `restore` is given the shards that come
        home and returns when their weights are here; if it raises, the engine waits for another `recover`.
        `memories` are those of ranks that are gone, where they can still be read: what lies there, and at ranks that
        are there, is copied. Sequences whose keys and values are not all found, or have no room here, are computed anew
        from their tokens; those that do not fit here at all leave, or fail (`on_impossible`).
        """
        self._home.abort(ending=memories is None)

        def come_home() -> int:
            self._loop.settle_all()  # the steps in flight, which are void or not
            self._loop.lost = RankLost(f"rank {lost!r} was lost", rank=lost)
            self._tell_no_kv()
            undone = self._undo_flip()
            self._end_exchange()
            again = self._take_home(restore, memories) if undone or self._away else 0
            before = self.path
            alone = LayerPath.alone(self.rank, before.layers, before.shards)
            self._part(replace(alone, epoch=before.epoch + 1))
            if before.copies > 1:
                self._share_out(1)
            self._memory.set_cap(None)
            self._end_impossible(self.on_impossible)
            self._loop.paused = False
            self._loop.go_on()
            return again

        return self._between_steps(come_home)

    # -- inside, on the loop's thread

    @property
    def _away(self) -> tuple[int, ...]:
        """The shards that other ranks compute, or computed, of all copies of the layers."""
        return tuple(shard for shard, rank in enumerate(self.path.ranks) if rank != self.rank)

    def _share_out(self, copies: int) -> None:
        """Have live sequences be shared out among copies of the layers, as many batches each; no step is in flight."""
        cohorts = copies * -(-(self._cohorts or 1) // copies)
        self._loop.set_copies(copies, cohorts)
        self._home.set_cohorts(cohorts)

    def _take_home(self, restore: Restore, memories: Mapping[str, KVSource] | None) -> int:
        """Have weights, keys and values of all layers here; return the tokens that are computed anew."""
        away = tuple(sorted({shard % self.path.numbers for shard in self._away}))
        kept = tuple(self._kept(copy, memories) for copy in range(self.path.copies))
        again = self._restart_lost(kept)
        try:
            restore(away)
            if self._loop.scheduler.begun:
                self._memory.add_layers(self._missing)
                for copy, sources in enumerate(kept):
                    self._copy_kept(copy, sources or {}, memories or {})
        except ElasticError as error:
            if not self._loop.scheduler.begun:
                raise
            logger.warning("all requests of rank %s are computed anew: %s", self.rank, error)
            self._free_kept()
            again += self._restart(None)
            restore(away)
        with self._memory.lock:
            self._memory.add_layers(self._missing)
        self._runner.cache.refresh()
        self._clear_uncomputed()
        self._loop.scheduler.keep()
        return again

    def _kept(self, copy: int, memories: Mapping[str, KVSource] | None) -> dict[str, LayersKV] | None:
        """Say where the keys and values of a copy are that lie elsewhere, by the rank; None: some are lost.

        Of those that several ranks have, one rank's are taken: rather of one that is there.
        """
        sources: dict[str, LayersKV] = {}
        path = self.path.of_copy(copy)
        wanted = self._kv_parts(shard for rank in path.helpers for shard in path.shards_of(rank))
        wanted -= self._kv_parts(path.shards_of(self.rank))
        if memories is None:
            return None if wanted else {}
        for rank in sorted(path.helpers, key=memories.__contains__):
            parts = self._kv_parts(path.shards_of(rank)) & wanted
            source = self._source(rank, parts, memories) if parts else None
            if source is not None:
                sources[rank] = source
                wanted -= parts
        return None if wanted else sources

    def _source(self, rank: str, parts: Collection[int], memories: Mapping[str, KVSource]) -> LayersKV | None:
        """Say where a rank has parts of the KV cache; None: it has gone, and nobody can read its memory."""
        if rank not in memories:
            told = self._home.still_at(rank, self.path.shards_of(rank), LAST_WORD_S)
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
            self._free_kept()
            return self._restart(None)
        scheduler, memory = self._loop.scheduler, self._memory
        lost = [sequence for sequence in scheduler.begun if not self._is_kept(sequence, kept)]
        again = self._restart({*lost, *scheduler.unkeepable()})
        weights = self._dropped_pages()
        if memory.lacking(self._missing) + weights > 0:
            self._free_kept()
        while scheduler.begun and memory.lacking(self._missing) + weights > 0:
            again += self._restart(scheduler.begun[-1:])
        return again

    def _free_kept(self) -> None:
        """Give back what is kept of instances that have gone, and that nobody was told of: the own ones come first."""
        for stage in list(self._stages.values()):
            if stage.ended and not stage.told:
                stage.close()

    def _is_kept(self, sequence: Sequence, kept: SequenceOf[Mapping[str, LayersKV] | None]) -> bool:
        """Return whether all that is computed of a sequence is here, or can be found."""
        sources = kept[self._loop.scheduler.copy_of(sequence)]
        if sources is None:
            return False
        pages = {part: sectors for source in sources.values() for part, sectors in source.pages.items()}
        return self._is_known(sequence, pages)

    def _restart(self, sequences: Collection[Sequence] | None) -> int:
        """Have sequences be computed anew, and no memory be kept that no other needs; return tokens."""
        again = self._loop.scheduler.restart(sequences)
        self._memory.set_cap(0)
        self._memory.reached_cap()  # which gives back all sectors that are not in use
        return again

    def _is_known(self, sequence: Sequence, pages: Mapping[int, Mapping[int, tuple[int, ...]]]) -> bool:
        """Return whether all that is computed of a sequence that lies elsewhere can be found."""
        for group, (computed, _) in enumerate(self._blocks.blocks_of(sequence.table, sequence.computed)):
            size, parts = self._memory.blocks_per_sector(group), self._memory.groups[group].group.layers
            sectors = {block // size for block in computed}
            if any(not sectors <= pages[part].keys() for part in parts if part in pages):
                return False
        return True

    @property
    def _missing(self) -> frozenset[int]:
        """The parts of the KV cache that have no memory here."""
        return self._kv_parts(range(self.path.numbers)) - frozenset(self._memory.layers)

    def _dropped_pages(self) -> int:
        """Count the pages that the weights will take which are not here."""
        missing = by_layer(self.runtime.dropped_shards, self.path.shards)
        every, pages = frozenset(range(self.path.shards)), self.runtime.shard_pages
        return sum(pages[layer].pages(every) - pages[layer].pages(every - {*parts}) for layer, parts in missing.items())

    def _copy_kept(self, copy: int, sources: Mapping[str, LayersKV], memories: Mapping[str, KVSource]) -> None:
        """Copy what a copy's sequences have elsewhere.

        Raises `StateError` where it cannot be read, or a rank has given it up meanwhile.
        """
        blocks = None if self.path.copies == 1 else self._computed_blocks(copy)
        for rank, source in sources.items():
            self._kv_exchange.copy(self._memory, source, source.pages, blocks, coordinated=False)
            if rank not in memories:
                after = self._source(rank, source.pages, {})
                if after is None or self._of_mapped(after) != self._of_mapped(source):
                    raise StateError(f"rank {rank!r} has given up keys and values while they were copied")

    def _computed_blocks(self, copy: int) -> list[list[int]]:
        """Return the blocks, by group, that hold what is computed of a copy's sequences."""
        scheduler = self._loop.scheduler
        tables = [
            self._blocks.blocks_of(sequence.table, sequence.computed)
            for sequence in scheduler.begun
            if scheduler.copy_of(sequence) == copy
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
        scheduler = self._loop.scheduler
        for group in range(len(self._memory.groups)):
            behind = [
                block
                for sequence in scheduler.begun
                for block in self._blocks.blocks_of(sequence.table, sequence.computed)[group][1]
            ]
            if behind:
                self._runner.cache.clear(group, np.array(behind, np.int64))

    def _end_crowded_out(self) -> None:
        """Let go of what was taken before other models took pages of the place, and can never end now."""
        if self._memory.attainable < self._memory.kv.limits.maximum:
            self._end_impossible(self.on_crowded_out)

    def _end_impossible(self, tell: Callable[[str, CapacityError], object] | None) -> None:
        """Let go of what was taken when there was room for it, and never fits here; `tell` of it, or have it fail."""
        scheduler = self._loop.scheduler
        for name, sequence in list(scheduler.sequences.items()):
            if name not in scheduler.sequences:
                continue  # it has left with another answer of its request
            try:
                self._blocks.require_possible(sequence.table.most_tokens)
            except Overloaded:
                pass  # it waits
            except CapacityError as error:
                if tell is None:
                    self._loop.fail(name, error)
                else:
                    request = sequence.request.id
                    for answer in self._requests.sequences(request):
                        scheduler.export(answer)
                    self._requests.forget(request, "moved")
                    tell(request, error)

    def _part(self, path: LayerPath) -> None:
        """Have nothing to do with other ranks any more, as a home."""
        self._home.reset(path)
        self._home.forward = None
        self._received.allow()
        self._release_forward()
        self._tell_kv()
