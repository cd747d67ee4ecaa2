"""Elastic layers in Hugging Face caches."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from elastic.errors import ConfigError
from elastic.kvcache.layers.base import PagedLayer
from elastic.kvcache.layers.full import ElasticLayer
from elastic.kvcache.layers.sliding import ElasticSlidingLayer
from elastic.kvcache.layers.split import RowSplitLayer
from elastic.kvcache.manager import KVMemory
from elastic.kvcache.storage.layout import KVLayout
from elastic.kvcache.storage.pool import KVPool

_MAX_TOKENS_IF_UNKNOWN = 8192
_ELASTIC = (ElasticLayer, RowSplitLayer)


def make_memory(config: Any, pools: Sequence[tuple[KVPool, KVLayout]], homes: Sequence[KVPool]) -> KVMemory:
    """Make the memory for caches of a model with this config; `homes` are the pools of its decoder layers."""
    max_tokens = getattr(config, "max_position_embeddings", None) or _MAX_TOKENS_IF_UNKNOWN
    layers = DynamicCache(config=config).layers[: len(homes)] or [DynamicLayer()] * len(homes)
    full = [index for index, layer in enumerate(layers) if type(layer) is DynamicLayer]
    sliding = [index for index, layer in enumerate(layers) if type(layer) is DynamicSlidingWindowLayer]
    return KVMemory(pools, max_tokens, homes, groups=(full + sliding, full))


class ElasticCaches:
    """Elastic caches for the hooks of one model."""

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory

    def make(self, config: Any) -> DynamicCache:
        """Make a cache for a model config, of the stock type, with elastic layers."""
        cache = DynamicCache(config=config)
        self.adopt(cache)
        return cache

    def adopt(self, cache: Any) -> None:
        """Give a plain, empty `DynamicCache` elastic layers; leave any other alone."""
        is_plain = type(cache) is DynamicCache and not cache.offloading
        if is_plain and not self._memory.closed and not any(map(_is_used, cache.layers)):
            adopt(cache, self._memory)

    def become_stock(self, cache: Any) -> None:
        """Undo `adopt`, whatever a cache holds by now: elastic layers give their memory up. Others are left alone."""
        if not isinstance(cache, DynamicCache):
            return
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, PagedLayer):
                cache.layers[index] = layer.to_stock()
                layer.give_up()
        if getattr(cache.layer_class_to_replicate, "func", None) is _next_layer:
            cache.layer_class_to_replicate = DynamicLayer

    def begin_forward(self, cache: Any) -> dict[int, int]:
        """Note that a forward pass of this thread uses the cache now; return what its elastic layers (ids) hold."""
        self._memory.begin_forward(cache)
        return {id(layer): layer.get_seq_length() for layer in _elastic_layers(cache)}

    def rewind(self, cache: Any, lengths: Mapping[int, int]) -> None:
        """Have elastic layers hold what `begin_forward` said again; those that came since hold nothing."""
        for layer in _elastic_layers(cache):
            layer.rewind(lengths.get(id(layer), 0))


def adopt(cache: Cache, memory: KVMemory) -> None:
    """Give an empty cache elastic layers, in place: references to it stay good.

    Only stock attention layers are replaced; linear-attention, indexed and hybrid layers stay what they are.
    """
    layers: list[Any] = []
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            layers.append(ElasticLayer(memory, index))
        elif type(layer) is DynamicSlidingWindowLayer:
            record_past = getattr(layer, "record_past", False)
            layers.append(ElasticSlidingLayer(memory, layer.sliding_window, record_past, index))
        else:
            layers.append(layer)
    cache.layers = layers
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = partial(_next_layer, weakref.ref(cache), memory)


class ElasticCache(DynamicCache):  # type: ignore[misc]
    """A cache over the virtual memory of a wrapped model, to be passed as `past_key_values`.

    `generate`, `pipeline` and plain calls of a wrapped model build one by themselves; make one explicitly to keep it
    between calls. Raises `ConfigError` for a model that is not wrapped.
    """

    def __init__(self, model: Any) -> None:
        runtime = getattr(model, "elastic", None)
        if runtime is None:
            raise ConfigError(f"{type(model).__name__} is not wrapped; call elastic.wrap(model) first")
        super().__init__(config=model.config)
        adopt(self, runtime.kv.memory)


def _elastic_layers(cache: Any) -> list[ElasticLayer | RowSplitLayer]:
    """List the elastic layers of any cache, or of what is none."""
    return [layer for layer in getattr(cache, "layers", ()) if isinstance(layer, _ELASTIC)]


def _is_used(layer: object) -> bool:
    """Return whether a layer holds anything, or is elastic already."""
    if isinstance(layer, PagedLayer):
        return True
    return bool(getattr(layer, "is_initialized", False) or any(getattr(layer, "is_conv_states_initialized", ())))


def _next_layer(cache_ref: weakref.ref[Cache], memory: KVMemory) -> ElasticLayer:
    """Make one more layer of a cache that makes them as they come."""
    cache = cache_ref()
    return ElasticLayer(memory, len(cache.layers) if cache is not None else None)
