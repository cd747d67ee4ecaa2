"""The KV cache of a wrapped model, as its user sees it: `model.elastic.kv`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, overload

from elastic.config import parse_limit
from elastic.errors import StateError
from elastic.types import KVStatus, Resize, ResizeKV

if TYPE_CHECKING:
    from elastic.kvcache.manager import KVMemory


class KV:
    """The KV cache of a wrapped model: `rt.kv`. Sizes are bytes.

    Where layers' caches are at several places, every generation needs room at each of them: capacity, limit and maximum
    are what all caches together may hold before the first place is full.
    """

    def __init__(self, memory: KVMemory, apply: Callable[..., Any]) -> None:
        """`apply`: the method of the runtime that does actions."""
        self.memory = memory
        self._apply = weakref.WeakMethod(apply)  # the runtime knows this object

    @property
    def capacity_bytes(self) -> int:
        """The most that new and running caches may hold together now."""
        return self._least(lambda status: status.capacity_bytes)

    @property
    def limit_bytes(self) -> int:
        """The limit last set."""
        return self._least(lambda status: status.limit_bytes)

    @property
    def maximum_bytes(self) -> int:
        """The highest limit: what the places' budgets have beside the model itself."""
        return self._least(lambda status: status.maximum_bytes)

    @property
    def used_bytes(self) -> int:
        """Mapped for caches that are alive, in whole pages, at all places."""
        return sum(pool.status().used_bytes for pool in self.memory.pools)

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
        """Set the most bytes that new caches may hold; "max": all that the model leaves them (docs/design.md).

        `applied`: what was above the new limit was given back. `deferred`: live caches hold more than the limit; they
        go on, and the rest is given back as they end. `stale`: `revision` is not above the last one; nothing changed.
        On several places the size is shared out by the layers whose caches are there; with `place` it is of that place.
        Raises `CapacityError` above the maximum, `ConfigError` for what is no size. With `wait=False`, a future of a
        tuple of results.
        """
        limit, shares = parse_limit(size, option="kv size"), self.memory.shares()
        if place is not None:
            actions = [ResizeKV(place, limit, revision)]
        elif limit is None or limit == self.maximum_bytes:  # there, a limit follows the maximum of its place
            actions = [ResizeKV(pool.pool.name, None, revision) for pool in shares]
        else:
            actions = [ResizeKV(pool.pool.name, int(limit * share), revision) for pool, share in shares.items()]
        done = self._require_wrapped()(actions, wait=wait)
        return done if isinstance(done, Future) else self._total(done)

    def trim(self) -> int:
        """Give every page that no living cache needs back to the system; returns bytes."""
        self._require_wrapped()
        return sum(pool.trim() for pool in self.memory.pools)

    def _least(self, size: Callable[[KVStatus], int]) -> int:
        return min(int(size(pool.status()) / share) for pool, share in self.memory.shares().items())

    def _total(self, results: Sequence[Resize]) -> Resize:
        """One result for what was shared out over several places."""
        if len(results) == 1:
            return results[0]
        order = ("applied", "stale", "deferred")
        return Resize(
            status=max((r.status for r in results), key=order.index),
            limit_bytes=self.limit_bytes,
            used_bytes=sum(r.used_bytes for r in results),
            overage_bytes=sum(r.overage_bytes for r in results),
            released_bytes=sum(r.released_bytes for r in results),
            revision=max(r.revision for r in results),
            moved_bytes=sum(r.moved_bytes for r in results),
        )

    def _require_wrapped(self) -> Callable[..., Any]:
        """Return the runtime's `apply`. Raises `StateError` where it is gone."""
        apply = self._apply()
        if apply is None:
            raise StateError("the model was unwrapped; wrap it again")
        return apply
