"""Memory for the cache layers of one instance, on however many places its decoder layers lie."""

from __future__ import annotations

import weakref

import torch

from elastic.errors import StateError
from elastic.kvcache.layers import ElasticLayer, Lease
from elastic.kvcache.layout import Geometry, Layout
from elastic.kvcache.pool import KVPool


class KVMemory:
    """Finds the KV pool of a device and leases stores from it.

    `max_tokens` is how many tokens address space is reserved for; a cache that outgrows it moves to twice that.
    """

    def __init__(self, pools: dict[torch.device, tuple[KVPool, Layout]], max_tokens: int) -> None:
        self._pools = pools
        self._max_tokens = max_tokens
        self.closed = False
        self._layers: weakref.WeakSet[ElasticLayer] = weakref.WeakSet()

    @property
    def pools(self) -> tuple[KVPool, ...]:
        """One for each place."""
        return tuple(pool for pool, _ in self._pools.values())

    def lease(
        self, shape_k: torch.Size, shape_v: torch.Size, like: torch.Tensor, tokens: int, user: ElasticLayer
    ) -> Lease:
        """A store for keys and values of these shapes, [batch, heads, …, dim], with the dtype and device of `like`."""
        if like.device not in self._pools:
            raise StateError(
                f"the model now computes on {like.device}, where it has no place (places: "
                f"{[str(d) for d in self._pools]}); unwrap, move it, and wrap it again"
            )
        pool, layout = self._pools[like.device]
        max_tokens = self._max_tokens
        while max_tokens < tokens:
            max_tokens *= 2
        page = pool.pool.page_bytes
        keys, values = (
            Geometry(layout, shape[0], shape[1], shape[3], like.dtype, max_tokens, page) for shape in (shape_k, shape_v)
        )
        lease = Lease(pool, pool.lease(keys, values, user), max_tokens)
        self._layers.add(user)
        return lease

    def let_go(self) -> None:
        """Turn every cache layer that lives into a stock one with a copy of its contents; make no more."""
        self.closed = True
        for layer in list(self._layers):
            if isinstance(layer, ElasticLayer):
                layer.become_stock()

    def check(self) -> None:
        for pool in self.pools:
            pool.check()
