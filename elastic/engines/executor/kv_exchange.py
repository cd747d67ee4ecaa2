"""Keys and values of layers that change their rank: where they lie here, and how those of other ranks come here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from elastic.engines.core.kv_state import KVFormat, LayersKV
from elastic.engines.executor.kv_copy import copy_layers
from elastic.errors import StateError
from elastic.kvcache.storage.sector_space import SectorSpace
from elastic.memory.backends.rank_memory import Peers
from elastic.memory.rate_limit import YieldingPace
from elastic.planning.sharding.heads import kv_parts
from elastic.types import RankMemory


class KVExchange:
    """What an engine and the stages of other instances at its rank exchange layers with."""

    def __init__(self, format: KVFormat, shards: int, pace: YieldingPace) -> None:
        """`shards`: into how many each decoder layer is cut."""
        self.format = format
        self.pace = pace
        """Of copies beside steps."""
        self._shards = shards
        self.peers: Peers | None = None
        """The other ranks; None: only memory files of this host can be read, and only by their processes."""

    def parts_of(self, shards: Iterable[int]) -> frozenset[int]:
        """Return the parts of the KV cache that shards of layers need.

        Parts of several copies of a layer have numbers of their own, as the shards do: `places_of` says where they are.
        """
        return frozenset(kv_parts(shards, self._shards, self.format.kv_shards))

    def places_of(self, parts: Iterable[int]) -> frozenset[int]:
        """Return the parts of a memory that parts of any copies of the layers lie in: the same for all copies."""
        count = sum(len(numbers) for numbers, _ in self.format.groups)
        return frozenset(part % count for part in parts)

    def places(self, shards: Iterable[int]) -> frozenset[int]:
        """Return the parts of a memory that the parts which shards need lie in."""
        return self.places_of(self.parts_of(shards))

    def locate(
        self, memory: SectorSpace, parts: Iterable[int], sectors: Iterable[tuple[int, int]] | None = None
    ) -> LayersKV:
        """Say where parts of the KV cache lie, all that is mapped or of mapped `sectors`, (group, sector).

        Raises `StateError` for a place that nobody else can read.
        """
        with memory.lock:
            pages = memory.layer_pages(parts, sectors)
        pool = memory.kv.pool
        file = pool.backend.shared_file()
        if file is None and self.peers is None:
            raise StateError(f"the KV cache on {pool.name} cannot be read by other processes")
        served = None if self.peers is None else RankMemory(self.peers.name, pool.name)
        return LayersKV(file, pool.page_bytes, self.format, pages, served)

    def copy(
        self,
        memory: SectorSpace,
        source: LayersKV,
        parts: Iterable[int],
        blocks: Sequence[Sequence[int]] | None = None,
        wanted: Callable[[], bool] = lambda: True,
        *,
        coordinated: bool,
    ) -> int:
        """Copy parts of the KV cache from another rank; return bytes. See `copy_layers`.

        `coordinated`: in chunks, behind what computes here; for copies that no step waits for.
        """
        pace = self.pace if coordinated else None
        return copy_layers(memory, source, parts, blocks, wanted, peers=self.peers, pace=pace)
