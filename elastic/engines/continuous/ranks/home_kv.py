"""The keys and values of an engine's own layers, as far as they are in the memory of its rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from elastic.engines.core.kv_state import LayersKV, SectorPages
from elastic.engines.executor.kv_exchange import KVExchange
from elastic.engines.executor.paged_cache import PagedCache
from elastic.engines.pipeline.home import HomeExecutor
from elastic.engines.pipeline.written_blocks import Blocks, require_known_sectors
from elastic.kvcache.storage.paged import BlockMemory


@dataclass(frozen=True)
class HomeKV:
    """Shards are numbered as in `LayerPath`; places are those parts of the memory that theirs lie in."""

    memory: BlockMemory
    cache: PagedCache
    exchange: KVExchange
    home: HomeExecutor

    @property
    def own_parts(self) -> frozenset[int]:
        """The parts of the KV cache that this rank's own steps write."""
        path = self.home.path
        return self.exchange.parts_of(path.shards_of(path.home))

    @property
    def own_places(self) -> frozenset[int]:
        """Where these lie."""
        return self.exchange.places_of(self.own_parts)

    @property
    def missing(self) -> frozenset[int]:
        """The parts of the KV cache that have no memory here."""
        return self.exchange.parts_of(range(self.home.path.numbers)) - frozenset(self.memory.layers)

    def locate(self, shards: Iterable[int], sectors: Iterable[tuple[int, int]] | None = None) -> LayersKV:
        """Say where those of shards lie; see `KVExchange.locate`."""
        return self.exchange.locate(self.memory, sorted(self.exchange.places(shards)), sectors)

    def mapped_since(self) -> list[SectorPages]:
        """Take the log of sectors: return where those are that are mapped, in the layers that are computed here."""
        memory, own = self.memory, self.own_places
        with memory.lock:
            log, memory.log = memory.log or [], []
            told = []
            for index, sector in dict.fromkeys(log):
                group = memory.groups[index]
                if sector in group.mapped:
                    layers = tuple(layer for layer in group.layers if layer in own)
                    told.append(SectorPages(index, sector, group.pages_of(sector, layers), layers))
            return told

    # -- on the loop's thread, but for `copy`

    def prepare(self, shards: Iterable[int]) -> None:
        """Make room for those of shards that come here. Raises `CapacityError`, and nothing has changed."""
        with self.memory.lock:
            keeps, self.memory.keep_sectors = self.memory.keep_sectors, False  # the own ones may go for it
            try:
                self.memory.add_layers(self.exchange.places(shards) - self.own_places)
            finally:
                self.memory.keep_sectors = keeps
        self.cache.refresh()

    def copy(self, shards: Iterable[int], source: LayersKV, blocks: Blocks | None, *, coordinated: bool) -> int:
        """Copy those of shards that are prepared; return bytes. See `KVExchange.copy`."""
        if blocks is not None:
            require_known_sectors(source, self.memory, blocks)
        parts = self.exchange.parts_of(shards) - self.own_parts  # steps write the others
        coming = sorted(self.exchange.places_of(parts))
        return self.exchange.copy(self.memory, source, coming, blocks, coordinated=coordinated)

    def drop(self, places: Collection[int]) -> None:
        """Give their memory back."""
        self.memory.remove_layers(places)
        self.cache.refresh()
