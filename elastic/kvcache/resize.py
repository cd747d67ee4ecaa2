"""The action that moves the limit of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.errors import ConfigError
from elastic.kvcache.pool import KVPool
from elastic.types import PlanStep, Resize, ResizeKV


@dataclass
class PreparedResize:
    """A resize that was checked; `result` is set by its commit."""

    action: ResizeKV
    previous_bytes: int
    result: Resize | None = None


class ResizeMechanism:
    """`ResizeKV`: check, prepare, commit, roll back."""

    def __init__(self, pools: tuple[KVPool, ...]) -> None:
        self._pools = {pool.pool.name: pool for pool in pools}

    def foresee(self, action: ResizeKV) -> PlanStep:
        """What the action would do now. Raises `ConfigError` or `CapacityError` if it cannot be done at all."""
        pool = self._pool(action)
        status, released = pool.foresee(action.limit_bytes, action.revision)
        return PlanStep(action, status, moved_bytes=0, released_pages=released, transient_pages=0, pause_ms=0.0)

    def prepare(self, action: ResizeKV) -> PreparedResize:
        """Check that the action can be done; a limit needs no preparation beyond that."""
        self.foresee(action)
        return PreparedResize(action, self._pool(action).status().limit_bytes)

    def commit(self, prepared: PreparedResize) -> Resize:
        """Move the limit, once."""
        if prepared.result is None:
            action = prepared.action
            prepared.result = self._pool(action).resize(action.limit_bytes, action.revision)
        return prepared.result

    def rollback(self, prepared: PreparedResize) -> None:
        """Undo a commit; what was given back to the system is created again when it is needed."""
        if prepared.result is not None and prepared.result.status != "stale":
            self._pool(prepared.action).resize(prepared.previous_bytes)
        prepared.result = None

    def _pool(self, action: ResizeKV) -> KVPool:
        if action.place not in self._pools:
            raise ConfigError(f"place={action.place!r} has no KV cache of this model; it lies on {list(self._pools)}")
        return self._pools[action.place]
