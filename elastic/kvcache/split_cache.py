"""KV caches whose layers are split by rows, for runs of replicated layers."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

from transformers.cache_utils import Cache, DynamicCache

from elastic.errors import CapacityError
from elastic.kvcache.hf_cache import adopt
from elastic.kvcache.layers.full import ElasticLayer
from elastic.kvcache.layers.split import RowSplitLayer
from elastic.kvcache.manager import KVMemory
from elastic.kvcache.storage.pool import KVPool

logger = logging.getLogger(__name__)


class RowSplitCaches:
    """The caches of one model, as its replica groups see them.

    Counts of rows are those at the place of the decoder layer's KV cache, then at `places`.
    """

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self._pools = {pool.pool.name: pool for pool in memory.pools}

    def begin_forward(self, cache: Any, layers: Collection[int]) -> None:
        """Layers of these indices may be split by rows from now on; all others are whole again, if there is room."""
        if not layers and not self._memory.split:
            return
        held = getattr(cache, "layers", [])
        _append_to(cache, max(layers, default=-1))
        for index, layer in enumerate(held):
            if isinstance(layer, RowSplitLayer) and index not in layers:
                held[index] = _whole(layer)
            elif type(layer) is not RowSplitLayer and isinstance(layer, ElasticLayer) and index in layers:
                held[index] = RowSplitLayer(layer)
                self._memory.split.add(held[index])

    def rows(self, cache: Any, layer: int, places: Sequence[str]) -> tuple[int, ...] | None:
        """The rows that a layer holds at each place; None: it holds nothing, or others have some."""
        split = self._split(cache, layer)
        shape = split.shape if split is not None else None
        if shape is None:
            return None
        held = dict(shape)
        counts = tuple(held.pop(pool, 0) for pool in (None, *map(self._pools.__getitem__, places)))
        return None if held else counts

    def split(
        self, cache: Any, layers: Sequence[int], places: Sequence[str], counts: Sequence[int]
    ) -> list[Any] | None:
        """Have so many rows of these layers at each place, in this order: for each place the cache as it sees it.

        None: this cache cannot be split, or a place has no room; it is good for all rows together, wherever they lie.
        """
        split = [self._split(cache, layer) for layer in layers]
        found = [layer for layer in split if layer is not None]
        if len(found) < len(split):
            return None
        shape = list(zip((None, *map(self._pools.__getitem__, places)), counts, strict=True))
        try:
            for layer in found:
                layer.resplit(shape)
        except CapacityError as error:
            logger.info("a KV cache stays where it is: %s", str(error))
            return None
        return [self._view(cache, layers, found, pool) if count else None for pool, count in shape]

    def _view(self, cache: Any, layers: Sequence[int], split: Sequence[RowSplitLayer], pool: KVPool | None) -> Cache:
        """The cache with one part of each split layer."""
        held = list(cache.layers)
        for layer, its in zip(layers, split, strict=True):
            held[layer] = its.part(pool)
        return Cache(layers=held)

    def _split(self, cache: Any, layer: int) -> RowSplitLayer | None:
        held = getattr(cache, "layers", [])
        found = held[layer] if layer < len(held) else None
        return found if isinstance(found, RowSplitLayer) else None


def without_rows(memory: KVMemory, config: Any) -> frozenset[int]:
    """The layers of a model whose caches are no elastic ones: their state cannot be split by rows."""
    cache = DynamicCache(config=config)
    adopt(cache, memory)
    return frozenset(i for i, layer in enumerate(cache.layers) if not isinstance(layer, ElasticLayer))


def _whole(layer: RowSplitLayer) -> ElasticLayer | RowSplitLayer:
    """All rows in one part again. Without room for that it stays as it is, and works."""
    try:
        layer.resplit([(None, sum(part.rows for part in layer.parts))])
    except CapacityError as error:
        logger.info("rows of a KV cache stay where a replica was: %s", str(error))
    return layer.whole() or layer


def _append_to(cache: Any, layer: int) -> None:
    """Have a cache that makes its elastic layers as they come make them up to this one."""
    make = getattr(cache, "layer_class_to_replicate", None)
    while make is not None and len(cache.layers) <= layer:
        made = make()
        if not isinstance(made, ElasticLayer):
            return
        cache.layers.append(made)
