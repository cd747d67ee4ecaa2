"""The KV cache of a wrapped model, as its user sees it: `model.elastic.kv`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

from elastic.config import parse_bytes
from elastic.errors import StateError
from elastic.types import KVStatus, Resize, ResizeKV

if TYPE_CHECKING:
    from elastic.kvcache.memory import KVMemory


class Doer(Protocol):
    """Who does actions: the runtime."""

    def apply(self, actions: Sequence[ResizeKV], *, wait: bool = True) -> Any: ...


class KV:
    """The KV cache of a wrapped model: `rt.kv`. Sizes are bytes, summed over the places of the model."""

    def __init__(self, memory: KVMemory, runtime: Doer) -> None:
        self.memory = memory
        self._runtime = weakref.ref(runtime)

    @property
    def capacity_bytes(self) -> int:
        """What new and running caches may hold together now."""
        return self._sum(lambda status: status.capacity_bytes)

    @property
    def limit_bytes(self) -> int:
        """The limit last set."""
        return self._sum(lambda status: status.limit_bytes)

    @property
    def maximum_bytes(self) -> int:
        """The highest limit: the places' budgets less the model itself."""
        return self._sum(lambda status: status.maximum_bytes)

    @property
    def used_bytes(self) -> int:
        """Mapped for caches that are alive, in whole pages."""
        return self._sum(lambda status: status.used_bytes)

    @overload
    def resize(
        self, size: int | str, *, place: str | None = None, revision: int | None = None, wait: Literal[True] = True
    ) -> Resize: ...

    @overload
    def resize(
        self, size: int | str, *, place: str | None = None, revision: int | None = None, wait: Literal[False]
    ) -> Future[tuple[Resize, ...]]: ...

    def resize(
        self, size: int | str, *, place: str | None = None, revision: int | None = None, wait: bool = True
    ) -> Resize | Future[tuple[Resize, ...]]:
        """Set the most bytes that new caches may hold (docs/design.md).

        `applied`: what lies above the new limit was given back. `deferred`: live caches hold more than the limit; they
        go on, and the rest is given back as they end. `stale`: `revision` is not above the last one; nothing changed.
        On several places the size is shared out in proportion to their maxima. Raises `CapacityError` above the
        maximum, `ConfigError` for what is no size. With `wait=False`, a future of a tuple of results.
        """
        limit = parse_bytes(size, option="kv size")
        actions = self._share(limit, place, revision)
        done = self._require_runtime().apply(actions, wait=wait)
        return done if isinstance(done, Future) else _total(done)

    def trim(self) -> int:
        """Give every page that no living cache needs back to the system; returns bytes."""
        self._require_runtime()
        return sum(pool.trim() for pool in self.memory.pools)

    def _share(self, limit: int, place: str | None, revision: int | None) -> list[ResizeKV]:
        pools = self.memory.used_pools
        if place is not None or len(pools) == 1:
            return [ResizeKV(place or pools[0].pool.name, limit, revision)]
        maxima = [pool.status().maximum_bytes for pool in pools]
        return [
            ResizeKV(pool.pool.name, limit * maximum // sum(maxima), revision)
            for pool, maximum in zip(pools, maxima, strict=True)
        ]

    def _sum(self, field: Callable[[KVStatus], int]) -> int:
        return sum(field(pool.status()) for pool in self.memory.used_pools)

    def _require_runtime(self) -> Doer:
        runtime = self._runtime()
        if runtime is None:
            raise StateError("the model was unwrapped; wrap it again")
        return runtime


def _total(results: Sequence[Resize]) -> Resize:
    """One result for what was shared out over several places."""
    order = ("applied", "stale", "deferred")
    return Resize(
        status=max((r.status for r in results), key=order.index),
        limit_bytes=sum(r.limit_bytes for r in results),
        used_bytes=sum(r.used_bytes for r in results),
        overage_bytes=sum(r.overage_bytes for r in results),
        released_bytes=sum(r.released_bytes for r in results),
        revision=max(r.revision for r in results),
    )
