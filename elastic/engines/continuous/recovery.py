"""How an engine goes on when a rank that computed layers of it is lost: with what others still have of them.

Keys and values outlive the process that computed them where somebody holds its memory file open. They are copied as
they are; only sequences of which some are lost, or find no room here, are computed anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

import numpy as np

from elastic.engines.continuous.layer_exchange import LayerExchange
from elastic.engines.core.kv_state import KVSource, LayersKV
from elastic.engines.core.sequence import Sequence
from elastic.engines.pipeline.path import LayerPath
from elastic.errors import CapacityError, ElasticError, Overloaded, RankLost, StateError
from elastic.runtime.runtime import Runtime

logger = logging.getLogger(__name__)
LAST_WORD_S = 5.0
"""How long is waited for what a rank had said before it was lost, and for what one that is there answers."""
Restore = Callable[[tuple[int, ...]], object]


class RecoveringEngine(LayerExchange):
    """What a rank asks of its engine when another one is lost. Thread-safe; not for listeners."""

    runtime: Runtime

    def recover(self, lost: str, restore: Restore, memories: Mapping[str, KVSource] | None = None) -> int:
        """Compute all layers here again, since a rank of the path was lost; return the tokens that are computed anew.

        Steps in flight are void, and the other ranks are told that it is over. `restore` is given the layers that come
        home and returns when their weights are here; if it raises, the engine waits for another `recover`.
        `memories` are those of ranks that are gone, where they can still be read: what lies there, and at ranks that
        are there, is copied. Sequences whose keys and values are not all found, or have no room here, are computed anew
        from their tokens; those that do not fit here at all fail.
        """
        self._home.abort(ending=memories is None)

        def come_home() -> int:
            self._settle_lost(lost)
            self._written = self._loop.scheduler.written = None
            self._memory.keep_sectors = False
            away = tuple(layer for layer, rank in enumerate(self.path.ranks) if rank != self.rank)
            again = self._take_home(away, restore, memories) if away else 0
            self._part(LayerPath(self.rank, (self.rank,) * len(self.path.ranks), self.path.epoch + 1))
            self._memory.set_cap(None)
            self._fail_impossible()
            self._loop.paused = False
            self._loop.go_on()
            return again

        return self._between_steps(come_home)

    # -- inside, on the loop's thread

    def _settle_lost(self, lost: str) -> None:
        """Finish the steps in flight, which are void or not."""
        self._loop.settle_all()
        self._loop.lost = RankLost(f"rank {lost!r} was lost", rank=lost)

    def _take_home(self, away: tuple[int, ...], restore: Restore, memories: Mapping[str, KVSource] | None) -> int:
        """Have weights, keys and values of all layers here; return the tokens that are computed anew."""
        sources = {} if memories is None else self._sources(memories)
        again = self._restart_lost(away, sources)
        try:
            restore(away)
            if self._loop.scheduler.begun:
                self._memory.add_layers(self._missing(away))
                self._copy_kept(sources, memories or {})
        except ElasticError as error:
            if not self._loop.scheduler.begun:
                raise
            logger.warning("all requests of rank %s are computed anew: %s", self.rank, error)
            again += self._restart(None)
            restore(away)
        with self._memory.lock:
            self._memory.add_layers(self._missing(away))
        self._runner.cache.refresh()
        self._clear_uncomputed()
        self._loop.scheduler.keep()
        return again

    def _sources(self, memories: Mapping[str, KVSource]) -> dict[str, LayersKV]:
        """Say where the keys and values of the layers elsewhere are, by the rank that computed them."""
        sources = {}
        for rank in self.path.guests:
            layers = self.path.shards_of(rank)
            if rank not in memories:
                sources[rank] = self._home.still_at(rank, layers, LAST_WORD_S)
                continue
            found: dict[int, Mapping[int, tuple[int, ...]]] = {}
            for layer in layers:
                found |= self._home.links[rank].located(self._memory.group_of(layer), (layer,), LAST_WORD_S)
            memory = memories[rank]
            sources[rank] = LayersKV(memory.file, memory.page_bytes, memory.format, found)
        known = {rank: source for rank, source in sources.items() if source is not None}
        return known if len(known) == len(sources) else {}

    def _restart_lost(self, away: tuple[int, ...], sources: Mapping[str, LayersKV]) -> int:
        """Have sequences be computed anew that cannot go on, or have no room, the youngest first; return tokens."""
        if not sources:
            return self._restart(None)
        scheduler, memory = self._loop.scheduler, self._memory
        pages = {layer: sectors for source in sources.values() for layer, sectors in source.pages.items()}
        lost = [sequence for sequence in scheduler.begun if not self._is_known(sequence, pages)]
        again = self._restart({*lost, *scheduler.unkeepable()})
        weights = self._dropped_pages(away)
        while scheduler.begun and memory.lacking(self._missing(away)) + weights > 0:
            again += self._restart(scheduler.begun[-1:])
        return again

    def _restart(self, sequences: Collection[Sequence] | None) -> int:
        """Have sequences be computed anew, and no memory be kept that no other needs; return tokens."""
        again = self._loop.scheduler.restart(sequences)
        self._memory.set_cap(0)
        self._memory.reached_cap()  # which gives back all sectors that are not in use
        return again

    def _is_known(self, sequence: Sequence, pages: Mapping[int, Mapping[int, tuple[int, ...]]]) -> bool:
        """Return whether all that is computed of a sequence in layers elsewhere can be found."""
        for group, (computed, _) in enumerate(self._blocks.blocks_of(sequence.table, sequence.computed)):
            size, layers = self._memory.blocks_per_sector(group), self._memory.groups[group].group.layers
            sectors = {block // size for block in computed}
            if any(not sectors <= pages[layer].keys() for layer in layers if layer in pages):
                return False
        return True

    def _missing(self, layers: tuple[int, ...]) -> frozenset[int]:
        """Return those of layers whose keys and values have no memory here."""
        return frozenset(layers) - frozenset(self._memory.layers)

    def _dropped_pages(self, layers: tuple[int, ...]) -> int:
        """Count the pages that the weights of layers will take, of those that are not here."""
        dropped = set(self.runtime.dropped)
        return sum(self.runtime.layer_pages[layer] for layer in layers if layer in dropped)

    def _copy_kept(self, sources: Mapping[str, LayersKV], memories: Mapping[str, KVSource]) -> None:
        """Copy what is elsewhere. Raises `StateError` where it cannot be read, or a rank has given it up meanwhile."""
        for rank, source in sources.items():
            self._kv_exchange.copy(self._memory, source, source.pages, coordinated=False)
            if rank not in memories:
                after = self._home.still_at(rank, tuple(source.pages), LAST_WORD_S)
                if after is None or self._of_mapped(after) != self._of_mapped(source):
                    raise StateError(f"rank {rank!r} has given up keys and values while they were copied")

    def _of_mapped(self, source: LayersKV) -> dict[int, dict[int, tuple[int, ...]]]:
        """Return where the sectors are that are mapped here: layer -> sector -> pages."""
        mapped = [group.mapped for group in self._memory.groups]
        return {
            layer: {
                sector: there for sector, there in sectors.items() if sector in mapped[self._memory.group_of(layer)]
            }
            for layer, sectors in source.pages.items()
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

    def _fail_impossible(self) -> None:
        """End what was taken because other ranks had room for it, and never fits here."""
        for name, sequence in list(self._loop.scheduler.sequences.items()):
            try:
                self._blocks.require_possible(sequence.table.most_tokens)
            except Overloaded:
                pass  # it waits
            except CapacityError as error:
                self._loop.fail(name, error)

    def _part(self, path: LayerPath) -> None:
        """Have nothing to do with other ranks any more, as a home."""
        self._home.reset(path)
        self._home.forward = None
        self._received.allow()
        self._release_forward()
        self._follow_journal()
