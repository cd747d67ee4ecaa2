"""The action that moves the limit of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from elastic.actions.base import ActionHandler
from elastic.errors import ConfigError, is_integer, require
from elastic.kvcache.layers.elastic_layer import OffloadedTokens
from elastic.kvcache.manager import KVMemory
from elastic.kvcache.storage.pool import KVPool
from elastic.types import PlanStep, Resize, ResizeKV


@dataclass
class PreparedResize:
    """A resize that was checked, and host copies of what it will move there; `result` is set by its commit."""

    action: ResizeKV
    pool: KVPool
    previous_bytes: int | None
    """None: the maximum."""
    copies: list[OffloadedTokens] = field(default_factory=list)
    result: Resize | None = None


class ResizeHandler(ActionHandler):
    """`ResizeKV`: check, prepare, commit, roll back."""

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self._pools = {pool.pool.name: pool for pool in memory.pools}

    def dry_run(self, action: ResizeKV) -> PlanStep:
        """Return what the action would do now. Raises `ConfigError` or `CapacityError` if it cannot be done at all."""
        pool = self._checked(action)
        status, released, over = pool.dry_run_resize(action.limit_bytes, action.revision)
        size, moved = pool.pool.page_bytes, 0
        if over and pool.host_offload:
            offered = sum(layer.pages for layer in self._memory.resting(pool))
            moved = min(over, offered)
            status = "applied" if offered >= over else status
        return PlanStep(action, status, moved * size, released + moved, transient_pages=0, pause_ms=0.0)

    def prepare(self, action: ResizeKV) -> PreparedResize:
        """Check; copy caches that rest to the host, as many as the limit needs, beside whatever runs."""
        pool = self._checked(action)
        _, _, over = pool.dry_run_resize(action.limit_bytes, action.revision)
        before = pool.limits
        at_maximum = before.limit == before.maximum
        previous_bytes = None if at_maximum else before.limit * pool.pool.page_bytes
        copies = self._memory.copy_resting(pool, over) if over and pool.host_offload else []
        return PreparedResize(action, pool, previous_bytes, copies)

    def commit(self, prepared: PreparedResize) -> None:
        """Move the limit, once. A cache that was used since it was copied stays where it is."""
        if prepared.result is None:
            moved = [copy.keys.nbytes + copy.values.nbytes for copy in prepared.copies if copy.layer.move_to_host(copy)]
            result = prepared.pool.resize(prepared.action.limit_bytes, prepared.action.revision)
            prepared.result = replace(result, moved_bytes=sum(moved))

    def rollback(self, prepared: PreparedResize) -> None:
        """Undo a commit. Pages that were given back, and caches on the host, return when they are next used."""
        if prepared.result is not None and prepared.result.status != "stale":
            prepared.pool.resize(prepared.previous_bytes)
        prepared.result = None

    def finish(self, prepared: PreparedResize) -> Resize:
        """Return the result."""
        assert prepared.result is not None
        return prepared.result

    def _checked(self, action: ResizeKV) -> KVPool:
        """Return the pool of an action whose numbers can be."""
        limit, revision = action.limit_bytes, action.revision
        good = limit is None or (is_integer(limit) and limit >= 0)
        require(good, "limit_bytes", limit, "whole bytes, at least 0, or None for the maximum")
        require(revision is None or is_integer(revision), "revision", revision, "a whole number, or None")
        if action.place not in self._pools:
            raise ConfigError(f"place={action.place!r} has no KV cache of this model; it lies on {list(self._pools)}")
        return self._pools[action.place]
