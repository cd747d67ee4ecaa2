"""The action that has the KV cache of decoder layers at another place (CoCoServe, section 3.3).

What caches hold is copied beside running forward passes; the safe point copies the tokens that were appended meanwhile,
and switches. A cache that was cropped, reordered or replaced meanwhile is copied again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from elastic.actions.base import ActionHandler
from elastic.actions.pages.allocation import find_pool
from elastic.errors import ConfigError, StateError
from elastic.kvcache.layers.elastic_layer import ElasticLayer
from elastic.kvcache.manager import KVMemory
from elastic.kvcache.storage.pool import KVPool
from elastic.kvcache.transfer import KVTransfer
from elastic.memory.copy_engine import CopyEngine, make_copy_engine
from elastic.memory.rate_limit import RateLimiter
from elastic.types import Change, MigrateKV, PlanStep

ROUNDS = 2
"""What is appended during the first is copied in the second, so that little is left for the safe point."""


@dataclass
class PreparedKVMigration:
    action: MigrateKV
    pool: KVPool
    layers: tuple[int, ...]
    """Of the action, those whose KV cache is elsewhere."""
    transfers: weakref.WeakKeyDictionary[ElasticLayer, KVTransfer] = field(default_factory=weakref.WeakKeyDictionary)
    """Of the cache layers that live. What was taken for one that died went with it."""
    homes: dict[int, KVPool] = field(default_factory=dict)
    """Before the commit."""


class MigrateKVHandler(ActionHandler):
    """`MigrateKV`: check, prepare, commit, roll back, finish."""

    def __init__(self, memory: KVMemory, copy_rate: RateLimiter, require_alone: Callable[[int], None]) -> None:
        """`require_alone` raises for a layer whose rows replicas share."""
        self._memory = memory
        self._require_alone = require_alone
        self._pools = {pool.pool.name: pool for pool in memory.pools}
        self._copy_rate = copy_rate
        self._copiers: dict[torch.device, CopyEngine] = {}

    def close(self) -> None:
        """Give up the threads or streams of copies."""
        while self._copiers:
            self._copiers.popitem()[1].close()

    def dry_run(self, action: MigrateKV) -> PlanStep:
        """Return what the action would do now. Raises `CapacityError` if the place has no room for it."""
        prepared = self._check(action)
        held = filter(None, (layer.held() for layer in self._leaving(prepared)))
        moved = sum((tokens.length - tokens.first) * tokens.lease.store.token_bytes for tokens in held)
        return PlanStep(action, "applied", moved, 0, self._pages(prepared), 0.0)

    def prepare(self, action: MigrateKV) -> PreparedKVMigration:
        """Take pages at the new place, and copy what caches hold into them."""
        prepared = self._check(action)
        try:
            for _ in range(ROUNDS):
                for layer in self._leaving(prepared):
                    transfer = prepared.transfers.setdefault(layer, KVTransfer(self._memory, prepared.pool))
                    transfer.sync(layer, lambda source: self._copier(source, prepared.pool), self._copy_rate)
        except BaseException:
            self.rollback(prepared)
            raise
        return prepared

    def commit(self, prepared: PreparedKVMigration) -> None:
        """Have new caches go to the new place from now on, and those that live go on there."""
        self._require_no_engine(prepared.layers)
        for index in prepared.layers:
            prepared.homes[index] = self._memory.homes[index]
            self._memory.homes[index] = prepared.pool
        for layer in self._leaving(prepared):
            prepared.transfers.setdefault(layer, KVTransfer(self._memory, prepared.pool)).cut_over(layer)

    def rollback(self, prepared: PreparedKVMigration) -> None:
        """Have everything go on where it was, and give the new pages back."""
        for index, pool in prepared.homes.items():
            self._memory.homes[index] = pool
        for layer, transfer in list(prepared.transfers.items()):
            transfer.revert(layer)
        prepared.transfers.clear()

    def finish(self, prepared: PreparedKVMigration) -> Change:
        """Have what caches have left be idle, for the next ones there, but for what tensors outside still show."""
        transfers = list(prepared.transfers.values())
        retained = sum(transfer.finish() for transfer in transfers)
        return Change("applied", prepared.layers, (), sum(p.moved_bytes for p in transfers), 0, retained)

    def _check(self, action: MigrateKV) -> PreparedKVMigration:
        """Return what is to be moved. Raises `CapacityError` if the place has no room for it."""
        homes, pool = self._memory.homes, find_pool(self._pools, action.place)
        unknown = [index for index in action.layers if not 0 <= index < len(homes)]
        if unknown:
            raise ConfigError(f"layer {unknown[0]} is no decoder layer of this model; use 0 to {len(homes) - 1}")
        for index in action.layers:
            self._require_alone(index)
        prepared = PreparedKVMigration(
            action, pool, tuple(index for index in action.layers if homes[index] is not pool)
        )
        self._require_no_engine(prepared.layers)
        pages, room = self._pages(prepared), pool.available(growing=False)
        if pages > room:
            raise pool.pool.shortage(
                f"place {action.place} has no room for the KV cache of layers {list(prepared.layers)}; migrate fewer, "
                "let generations end, or raise its limit or its budget",
                pages,
                room,
                pool.status().capacity_bytes // pool.pool.page_bytes,
            )
        return prepared

    def _require_no_engine(self, layers: tuple[int, ...]) -> None:
        if layers and any(pool.usage.sectors for pool in self._memory.pools):
            raise StateError(
                "a continuous batching engine has its KV cache in blocks, which stay at one place; stop it first, or "
                "migrate only the weights: rt.migrate(…, kv=False)"
            )

    def _leaving(self, prepared: PreparedKVMigration) -> Iterator[ElasticLayer]:
        """Yield the cache layers that live and are not at the new place; of these only the last given is kept alive."""
        living = [weakref.ref(layer) for layer in self._memory.layers_of(prepared.action.layers)]
        for reference in living:
            layer = reference()
            if layer is not None and not layer.is_on(prepared.pool):
                yield layer
            del layer

    def _pages(self, prepared: PreparedKVMigration) -> int:
        """Count the pages that the caches which live now would take at the new place."""
        held = (layer.held() for layer in self._leaving(prepared))
        return sum(self._memory.pages_at(prepared.pool, tokens) for tokens in held if tokens is not None)

    def _copier(self, source: KVPool, target: KVPool) -> CopyEngine:
        devices = [pool.pool.backend.device for pool in (target, source)]
        device = next((device for device in devices if device.type == "cuda"), devices[0])
        if device not in self._copiers:
            self._copiers[device] = make_copy_engine(device)
        return self._copiers[device]
