"""Memory for the cache layers of one instance, on however many places its decoder layers lie."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

import torch

from elastic.errors import StateError
from elastic.kvcache.layers.full import ElasticLayer
from elastic.kvcache.layers.split import RowSplitLayer
from elastic.kvcache.storage.layout import KVLayout, StoreGeometry
from elastic.kvcache.storage.lease import HeldTokens, StoreLease
from elastic.kvcache.storage.pool import KVPool
from elastic.types import KVStatus


class KVMemory:
    """Finds the KV pool of a layer and leases stores from it.

    `homes` are the pools of the decoder layers, by index; a cache layer that is of none of them gets the first pool of
    its device. A home may be on another device than its layer. `max_tokens` is how many tokens address space is
    reserved for; a cache that outgrows it moves to twice that. `groups` are layers (indices) that fill alike: all in
    short texts, those without a sliding window in long ones. None: all always do.
    """

    def __init__(
        self,
        pools: Sequence[tuple[KVPool, KVLayout]],
        max_tokens: int,
        homes: Sequence[KVPool] = (),
        groups: Sequence[Collection[int]] = (),
    ) -> None:
        self._layouts = dict(pools)
        self.homes = list(homes)
        self._groups = [group for group in groups if group]
        self._max_tokens = max_tokens
        self.closed = False
        self.attention_follows: Callable[[], bool] = lambda: False
        """Whether the model's attention takes keys and values that are on another device than its queries."""
        self._clock = itertools.count(1)
        self._latest: dict[int, weakref.ref[object]] = {}  # thread -> the cache it used last
        self._caches: weakref.WeakSet[object] = weakref.WeakSet()  # those that a forward pass has used
        self._layers: weakref.WeakSet[ElasticLayer] = weakref.WeakSet()
        self._adding = threading.Lock()  # to the last set
        self.split: weakref.WeakSet[RowSplitLayer] = weakref.WeakSet()
        """Layers whose rows lie at several places."""

    @property
    def pools(self) -> tuple[KVPool, ...]:
        """One for each place."""
        return tuple(self._layouts)

    @property
    def used_pools(self) -> tuple[KVPool, ...]:
        """Those where the KV cache of any decoder layer is."""
        return tuple(self.shares())

    def shares(self) -> dict[KVPool, Fraction]:
        """Where KV caches are, and the part of a cache that is there: of the layers' caches, in texts of any length."""
        homes = self.homes or self.pools
        groups = self._groups or [range(len(homes))]
        found = {pool: max(_part(pool, homes, group) for group in groups) for pool in self.pools}
        return {pool: share for pool, share in found.items() if share}

    def status(self) -> tuple[KVStatus, ...]:
        """Of every place."""
        shares = self.shares()
        return tuple(replace(pool.status(), share=float(shares.get(pool, 0))) for pool in self.pools)

    def tick(self) -> int:
        """A number above all earlier ones: the clock by which the longest unused caches are found."""
        return next(self._clock)

    def lease(self, keys: torch.Tensor, values: torch.Tensor, tokens: int, user: ElasticLayer) -> StoreLease:
        """A store for keys and values such as these, [batch, heads, …, dim], with room for `tokens`."""
        with self._adding:  # before the pool is chosen: a migration sees the layer, or the layer the new home
            self._layers.add(user)
        pool = self._pool_of(user)
        layout = self._layouts[pool]
        max_tokens = self._max_tokens
        while max_tokens < tokens:
            max_tokens *= 2
        page = pool.pool.page_bytes
        k, v = (
            StoreGeometry(layout, t.shape[0], t.shape[1], t.shape[3], t.dtype, max_tokens, page) for t in (keys, values)
        )
        return StoreLease(pool, pool.lease(k, v, user, born=user.limit_epoch), max_tokens)

    def lease_like(self, lease: StoreLease, pool: KVPool, user: ElasticLayer) -> StoreLease:
        """A store at another place, for keys and values of the same shapes."""
        return StoreLease(pool, pool.lease(*self._geometries(lease, pool), user), lease.max_tokens)

    def pages_like(self, held: HeldTokens, pool: KVPool) -> int:
        """Pages that what a layer holds would take at another place."""
        geometries = self._geometries(held.lease, pool)
        return sum(g.rows * g.slots(0, held.length - held.first)[1] for g in geometries)

    def _geometries(self, lease: StoreLease, pool: KVPool) -> tuple[StoreGeometry, StoreGeometry]:
        layout, page = self._layouts[pool], pool.pool.page_bytes
        keys, values = lease.store.geometries
        return replace(keys, layout=layout, page_bytes=page), replace(values, layout=layout, page_bytes=page)

    def layers_of(self, indices: Collection[int]) -> list[ElasticLayer]:
        """All living cache layers of these decoder layers that follow them."""
        with self._adding:
            layers = list(self._layers)
        return [layer for layer in layers if _follows(layer) and layer.index in indices]

    def _pool_of(self, user: ElasticLayer) -> KVPool:
        if user.fixed_pool is not None:
            return user.fixed_pool
        here = [pool for pool in self._layouts if pool.pool.backend.device == user.device]
        if not here:
            raise StateError(
                f"the model now computes on {user.device}, where it has no place (places: "
                f"{[pool.pool.name for pool in self._layouts]}); unwrap, move it, and wrap it again"
            )
        return self.homes[user.index] if user.index is not None and user.index < len(self.homes) else here[0]

    def begin_forward(self, cache: object) -> None:
        """A forward pass of this thread uses `cache` now: it is no longer resting."""
        self._latest[threading.get_ident()] = weakref.ref(cache)
        self._caches.add(cache)

    def resting(self, pool: KVPool) -> list[ElasticLayer]:
        """Layers on a pool that no thread is generating with, the longest unused first.

        A thread generates with the cache that it used last. Others (an earlier turn of another conversation) may wait
        in host memory; not those that never saw a forward pass, whose owner drives them at any moment.
        """
        alive = {thread.ident for thread in threading.enumerate()}
        self._latest = {ident: cache for ident, cache in self._latest.items() if ident in alive}
        running = {id(cache()) for cache in self._latest.values()}
        resting = [cache for cache in list(self._caches) if id(cache) not in running]
        here = [layer for cache in resting for layer in parts_of(cache) if layer.is_on(pool)]
        return sorted(here, key=lambda layer: layer.last_used)

    def let_go(self) -> None:
        """Turn every cache layer that lives into a stock one with a copy of its contents; make no more."""
        self.closed = True
        for split in list(self.split):
            if isinstance(split, RowSplitLayer):
                split.become_stock()
        for layer in list(self._layers):
            if isinstance(layer, ElasticLayer):
                layer.become_stock()

    def check(self) -> None:
        for pool in self.pools:
            pool.check()


def _follows(layer: object) -> bool:
    """Whether a cache layer's contents are where its decoder layer's KV cache is."""
    return isinstance(layer, ElasticLayer) and layer.fixed_pool is None  # one that has become a stock layer is none


def _part(pool: KVPool, homes: Sequence[KVPool], layers: Collection[int]) -> Fraction:
    """Of the layers' caches that are in a pool."""
    return Fraction(sum(homes[index] is pool for index in layers), len(layers))


def parts_of(cache: object) -> Iterator[ElasticLayer]:
    """The elastic layers of any cache, and the parts of those that are split."""
    for layer in getattr(cache, "layers", ()):
        if isinstance(layer, RowSplitLayer):
            yield from (part.layer for part in layer.parts)
        elif isinstance(layer, ElasticLayer):
            yield layer
