"""KV caches whose layers are split by rows, for replicated layers."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

from transformers.cache_utils import Cache, DynamicCache

from elastic.errors import CapacityError
from elastic.kvcache.layers.elastic_layer import ElasticLayer
from elastic.kvcache.layers.split import RowSplitLayer
from elastic.kvcache.manager import KVMemory, adopt

logger = logging.getLogger(__name__)


class RowSplitCaches:
    """The caches of one model, as its replica groups see them.

    Counts of rows are those at the place of the decoder layer's KV cache, then at `places`.
    """

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self._pools = {pool.pool.name: pool for pool in memory.pools}

    def begin_forward(self, cache: Any, layers: Collection[int]) -> None:
        """Let layers of these indices be split by rows from now on; all others are whole again, if there is room."""
        if not layers and not self._memory.split:
            return
        held = getattr(cache, "layers", [])
        _extend(cache, max(layers, default=-1))
        for index, layer in enumerate(held):
            if isinstance(layer, RowSplitLayer) and index not in layers:
                held[index] = _whole(layer)
            elif isinstance(layer, ElasticLayer) and index in layers:
                held[index] = RowSplitLayer(layer)
                self._memory.split.add(held[index])

    def rows(self, cache: Any, layer: int, places: Sequence[str]) -> tuple[int, ...] | None:
        """Count the rows that a layer holds at each place; None: it holds nothing, or others have some."""
        split = _split_layer(cache, layer)
        shape = split.shape if split is not None else None
        if shape is None:
            return None
        rows = dict(shape)
        counts = tuple(rows.pop(pool, 0) for pool in (None, *map(self._pools.__getitem__, places)))
        return None if rows else counts

    def split(
        self, cache: Any, layers: Sequence[int], places: Sequence[str], counts: Sequence[int]
    ) -> list[Any] | None:
        """Have so many rows of these layers at each place, in this order; return for each place its part of the cache.

        None: this cache cannot be split, or a place has no room; it is good for all rows together, wherever they are.
        """
        split = {index: layer for index in layers if (layer := _split_layer(cache, index)) is not None}
        if len(split) < len(layers):
            return None
        shape = list(zip((None, *map(self._pools.__getitem__, places)), counts, strict=True))
        try:
            for layer in split.values():
                layer.resplit(shape)
        except CapacityError as error:
            logger.info("a KV cache stays where it is: %s", str(error))
            return None
        parts: list[Cache | None] = []
        for pool, count in shape:
            held = list(cache.layers)
            for index, layer in split.items() if count else ():
                held[index] = next(part.layer for part in layer.parts if part.layer.fixed_pool is pool)
            parts.append(Cache(layers=held) if count else None)
        return parts


def without_rows(memory: KVMemory, config: Any) -> frozenset[int]:
    """Return the layers of a model whose caches are no elastic ones: their state cannot be split by rows."""
    cache = DynamicCache(config=config)
    adopt(cache, memory)
    return frozenset(i for i, layer in enumerate(cache.layers) if not isinstance(layer, ElasticLayer))


def _split_layer(cache: Any, index: int) -> RowSplitLayer | None:
    layers = getattr(cache, "layers", [])
    layer = layers[index] if index < len(layers) else None
    return layer if isinstance(layer, RowSplitLayer) else None


def _whole(layer: RowSplitLayer) -> ElasticLayer | RowSplitLayer:
    """Have all rows in one part again. Without room for that it stays as it is, and works."""
    try:
        layer.resplit([(None, sum(part.rows for part in layer.parts))])
    except CapacityError as error:
        logger.info("rows of a KV cache stay where a replica was: %s", str(error))
        return layer
    return layer.parts[0].layer


def _extend(cache: Any, layer: int) -> None:
    """Have a cache that makes its elastic layers as they come make them up to this one."""
    make = getattr(cache, "layer_class_to_replicate", None)
    while make is not None and len(cache.layers) <= layer:
        made = make()
        if not isinstance(made, ElasticLayer):
            return
        cache.layers.append(made)
