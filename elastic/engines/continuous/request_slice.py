"""The cache as some requests of a batch see it: it is passed to their layers, at whatever place they compute.

Requests write blocks of their own, and blocks that they share are only read. So sub-batches of one batch may attend at
the same time, each in the thread of its place; keys and values stay where the cache is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from elastic.engines.continuous.attention import attend
from elastic.engines.continuous.attention_inputs import AttentionBatch, RequestTokens, make_batch
from elastic.errors import ConfigError
from elastic.memory.copy_engine import to_device


class PagedCache(Protocol):
    """The cache of the engine."""

    device: torch.device
    dtype: torch.dtype
    layer_to_allocator: Mapping[int, Any]


class RequestSlice:
    """Consecutive requests of a batch, and their tokens."""

    def __init__(self, cache: PagedCache, requests: Sequence[RequestTokens]) -> None:
        first, last = requests[0], requests[-1]
        self._cache = cache
        self._tokens = slice(first.start, last.start + last.count)
        self._requests = [replace(request, start=request.start - first.start) for request in requests]
        self._batches: dict[int, AttentionBatch] = {}  # by allocator

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse other attention functions, which could not tell keys and values apart. Raises `ConfigError`."""
        raise ConfigError("this model's attention adds to its scores (softcap, sinks, biases); use generate instead")

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        write_index: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Attend in one layer. query: [1, heads, new, dim], key and value: [1, kv_heads, new, dim], on any device.

        `write_index` is that of the whole batch. Returns [1, new, heads, dim].
        """
        allocator, device = self._cache.layer_to_allocator[layer], self._cache.device
        batch = self._batches.get(allocator.index)
        if batch is None:
            batch = make_batch(self._requests, allocator, device, self._cache.dtype)
            self._batches[allocator.index] = batch
        q, k, v = (to_device(states[0], device) for states in (query, key, value))
        rows = to_device(write_index[allocator.index][self._tokens], device)
        return attend(q, k, v, allocator.layers[layer], batch, rows, scaling)[None].to(query.device)
