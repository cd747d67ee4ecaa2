"""The Hugging Face caches of one instance, and memory for their layers, wherever its decoder layers are."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from elastic.errors import StateError
from elastic.kvcache.layers.base import PagedLayer
from elastic.kvcache.layers.elastic_layer import ElasticLayer, HeldTokens, OffloadedTokens
from elastic.kvcache.layers.split import RowSplitLayer
from elastic.kvcache.storage.layout import KVLayout, StoreGeometry
from elastic.kvcache.storage.pool import KVPool, StoreLease
from elastic.types import KVStatus


class KVMemory:
    """Gives caches elastic layers, finds the KV pool of each, and leases stores from it.

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
        self.pools = tuple(self._layouts)
        """One for each place."""
        self.homes = list(homes)
        self._groups = [group for group in groups if group]
        self._max_tokens = max_tokens
        self.closed = False
        self.attention_follows: Callable[[], bool] = lambda: False
        """Whether the model's attention takes keys and values that are on another device than its queries."""
        self.clock: Iterator[int] = itertools.count(1)
        """Numbers that rise: by them the longest unused caches are found."""
        self._latest: dict[int, weakref.ref[object]] = {}  # thread -> the cache it used last
        self._caches: weakref.WeakSet[object] = weakref.WeakSet()  # those that a forward pass has used
        self._layers: weakref.WeakSet[ElasticLayer] = weakref.WeakSet()
        self._lock = threading.Lock()  # of these three: threads add to them while others go through them
        self.split: weakref.WeakSet[RowSplitLayer] = weakref.WeakSet()
        """Layers whose rows are at several places."""

    # -- memory for layers

    def shares(self) -> dict[KVPool, Fraction]:
        """Return the pools that hold KV caches, and the part of a cache that each holds, in texts of any length."""
        homes = self.homes or self.pools
        groups = self._groups or [range(len(homes))]
        shares = {
            pool: max(Fraction(sum(homes[index] is pool for index in group), len(group)) for group in groups)
            for pool in self.pools
        }
        return {pool: share for pool, share in shares.items() if share}

    def status(self) -> tuple[KVStatus, ...]:
        """Return a snapshot of every place."""
        shares = self.shares()
        return tuple(replace(pool.status(), share=float(shares.get(pool, 0))) for pool in self.pools)

    def lease(self, keys: torch.Tensor, values: torch.Tensor, tokens: int, user: ElasticLayer) -> StoreLease:
        """Lease a store for keys and values such as these, [batch, heads, …, dim], with room for `tokens`.

        Raises `CapacityError`, or `StateError` where the model has left its places.
        """
        with self._lock:  # before the pool is chosen: a migration sees the layer, or the layer the new home
            self._layers.add(user)
        pool = self._pool_of(user)
        layout, page_bytes, max_tokens = self._layouts[pool], pool.pool.page_bytes, self._max_tokens
        while max_tokens < tokens:
            max_tokens *= 2
        key_geometry, value_geometry = (
            StoreGeometry(layout, t.shape[0], t.shape[1], t.shape[3], t.dtype, max_tokens, page_bytes)
            for t in (keys, values)
        )
        return pool.lease(key_geometry, value_geometry, user, epoch=user.limit_epoch)

    def geometries_at(self, pool: KVPool, held: HeldTokens) -> tuple[StoreGeometry, StoreGeometry]:
        """Return the geometries that what a layer holds would have at another place."""
        layout, page_bytes = self._layouts[pool], pool.pool.page_bytes
        keys, values = (replace(g, layout=layout, page_bytes=page_bytes) for g in held.lease.store.geometries)
        return keys, values

    def pages_at(self, pool: KVPool, held: HeldTokens) -> int:
        """Count the pages that what a layer holds would take at another place."""
        tokens = held.length - held.first
        return sum(g.rows * g.slots(0, tokens)[1] for g in self.geometries_at(pool, held))

    def layers_of(self, indices: Collection[int]) -> list[ElasticLayer]:
        """List all living cache layers of these decoder layers that follow them."""
        with self._lock:
            layers = list(self._layers)
        return [
            layer
            for layer in layers
            if isinstance(layer, ElasticLayer)  # one that has become a stock layer is none
            and layer.fixed_pool is None
            and layer.index in indices
        ]

    # -- what the hooks of a forward pass do

    def among(self, values: Iterable[Any]) -> Cache | None:
        """Return the first of these values that is a KV cache; None if none is."""
        return next((value for value in values if isinstance(value, Cache)), None)

    def adopt(self, cache: Any) -> None:
        """Give a plain, empty `DynamicCache` elastic layers; leave any other alone."""
        is_plain = type(cache) is DynamicCache and not cache.offloading
        if is_plain and not self.closed and not any(map(_is_used, cache.layers)):
            adopt(cache, self)

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
        """Note that a forward pass of this thread uses a cache now, which rests no longer.

        Returns the tokens that its elastic layers (ids) hold.
        """
        thread = threading.get_ident()
        latest = self._latest.get(thread)
        if latest is None or latest() is not cache:
            with self._lock:
                self._latest[thread] = weakref.ref(cache)
                self._caches.add(cache)
        return {id(layer): layer.get_seq_length() for layer in _whole_layers(cache)}

    def rewind(self, cache: Any, lengths: Mapping[int, int]) -> None:
        """Have elastic layers hold what `begin_forward` said again; those that came since hold nothing."""
        for layer in _whole_layers(cache):
            layer.rewind(lengths.get(id(layer), 0))

    # -- caches that rest

    def resting(self, pool: KVPool) -> list[ElasticLayer]:
        """List the layers on a pool that no thread is generating with, the longest unused first.

        A thread generates with the cache that it used last. Others (an earlier turn of another conversation) may wait
        in host memory; not those that never saw a forward pass, whose owner drives them at any moment.
        """
        alive = {thread.ident for thread in threading.enumerate()}
        with self._lock:
            self._latest = {ident: cache for ident, cache in self._latest.items() if ident in alive}
            running, caches = {id(cache()) for cache in self._latest.values()}, list(self._caches)
        resting = [cache for cache in caches if id(cache) not in running]
        layers = [layer for cache in resting for layer in elastic_layers(cache) if layer.is_on(pool)]
        return sorted(layers, key=lambda layer: layer.last_used)

    def copy_resting(self, pool: KVPool, pages: int) -> list[OffloadedTokens]:
        """Copy caches that rest to host memory: so many that at least `pages` come free if they move there."""
        copies = []
        for layer in self.resting(pool):
            copy = layer.copy_to_host() if pages > 0 else None
            if copy is not None:
                pages -= layer.pages
                copies.append(copy)
        return copies

    # -- all of them

    def let_go(self) -> None:
        """Turn every cache layer that lives into a stock one with a copy of its contents; make no more."""
        self.closed = True
        with self._lock:
            layers = [*self.split, *self._layers]
        for layer in layers:
            if isinstance(layer, RowSplitLayer | ElasticLayer):  # parts become stock layers with the whole
                layer.become_stock()

    def check(self) -> None:
        """Recount the caches of every place; raises `IntegrityError`."""
        for pool in self.pools:
            pool.check()

    def _pool_of(self, user: ElasticLayer) -> KVPool:
        if user.fixed_pool is not None:
            return user.fixed_pool
        of_its_device = [pool for pool in self.pools if pool.device == user.device]
        if not of_its_device:
            raise StateError(
                f"the model now computes on {user.device}, where it has no place (places: "
                f"{[pool.pool.name for pool in self.pools]}); unwrap, move it, and wrap it again"
            )
        if user.index is not None and user.index < len(self.homes):
            return self.homes[user.index]
        return of_its_device[0]


def elastic_layers(cache: object) -> Iterator[ElasticLayer]:
    """Yield the elastic layers of any cache, and the parts of those that are split."""
    for layer in getattr(cache, "layers", ()):
        if isinstance(layer, RowSplitLayer):
            yield from (part.layer for part in layer.parts)
        elif isinstance(layer, ElasticLayer):
            yield layer


def adopt(cache: Cache, memory: KVMemory) -> None:
    """Give an empty cache elastic layers, in place: references to it stay good.

    Only stock attention layers are replaced; linear-attention, indexed and hybrid layers stay what they are.
    """
    layers: list[Any] = []
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            layers.append(ElasticLayer(memory, index))
        elif type(layer) is DynamicSlidingWindowLayer:
            window, past = layer.sliding_window, getattr(layer, "record_past", False)
            layers.append(ElasticLayer(memory, index, sliding_window=window, record_past=past))
        else:
            layers.append(layer)
    cache.layers = layers
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = partial(_next_layer, weakref.ref(cache), memory)


def _whole_layers(cache: Any) -> list[PagedLayer]:
    """List the elastic layers of any cache, or of what is none, without parts."""
    return [layer for layer in getattr(cache, "layers", ()) if isinstance(layer, PagedLayer)]


def _is_used(layer: object) -> bool:
    """Return whether a layer holds anything, or is elastic already."""
    if isinstance(layer, PagedLayer):
        return True
    return bool(getattr(layer, "is_initialized", False) or any(getattr(layer, "is_conv_states_initialized", ())))


def _next_layer(cache_ref: weakref.ref[Cache], memory: KVMemory) -> ElasticLayer:
    """Make one more layer of a cache that makes them as they come."""
    cache = cache_ref()
    return ElasticLayer(memory, len(cache.layers) if cache is not None else None)
