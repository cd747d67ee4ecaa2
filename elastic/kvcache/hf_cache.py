"""The KV caches of a model, as its config says: the memory for them, and one that its user makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from elastic.errors import ConfigError
from elastic.kvcache.manager import KVMemory, adopt
from elastic.kvcache.storage.layout import KVLayout
from elastic.kvcache.storage.pool import KVPool
from elastic.weights.decoder import context_length

_MAX_TOKENS_IF_UNKNOWN = 8192


def make_memory(config: Any, pools: Sequence[tuple[KVPool, KVLayout]], homes: Sequence[KVPool]) -> KVMemory:
    """Make the memory for caches of a model with this config; `homes` are the pools of its decoder layers."""
    max_tokens = context_length(config) or _MAX_TOKENS_IF_UNKNOWN
    layers = DynamicCache(config=config).layers[: len(homes)] or [DynamicLayer()] * len(homes)
    full = [index for index, layer in enumerate(layers) if type(layer) is DynamicLayer]
    sliding = [index for index, layer in enumerate(layers) if type(layer) is DynamicSlidingWindowLayer]
    return KVMemory(pools, max_tokens, homes, groups=(full + sliding, full))


class ElasticCache(DynamicCache):  # type: ignore[misc]
    """A cache over the virtual memory of a wrapped model, to be given to it as any other.

    What `generate`, `pipeline` and plain calls of a wrapped model use becomes elastic by itself; make one explicitly to
    keep it between calls. Raises `ConfigError` for a model that is not wrapped.
    """

    def __init__(self, model: Any) -> None:
        runtime = getattr(model, "elastic", None)
        if runtime is None:
            raise ConfigError(f"{type(model).__name__} is not wrapped; call elastic.wrap(model) first")
        super().__init__(config=model.config)
        adopt(self, runtime.kv.memory)
