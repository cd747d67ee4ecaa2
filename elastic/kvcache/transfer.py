"""The move of what one cache layer holds to another place."""

from __future__ import annotations

from collections.abc import Callable

from elastic.kvcache.layers.elastic_layer import ElasticLayer, HeldTokens
from elastic.kvcache.manager import KVMemory
from elastic.kvcache.storage.pool import KVPool, StoreLease
from elastic.memory import copy_engine
from elastic.memory.backends.streams import finish_queued_work, on_stream
from elastic.memory.copy_engine import CopyEngine, Pair, StreamCopyEngine
from elastic.memory.rate_limit import RateLimiter

FROM_ELSEWHERE = -1
"""When the contents were begun, for caches that have moved: before any shrink of the new place's limit."""


class KVTransfer:
    """A lease at the new place, and the tokens that it has already. It does not keep the cache layer alive.

    `sync` may be called as often as wanted while the layer is in use; `cut_over` once, at the safe point.
    """

    def __init__(self, memory: KVMemory, pool: KVPool) -> None:
        self.moved_bytes = 0
        self._memory = memory
        self._pool = pool
        self._epoch = 0
        self._target: StoreLease | None = None
        self._origin = 0  # the token at its beginning
        self._copied = 0  # it has the tokens before this one
        self._previous: HeldTokens | None = None  # what the layer held before it was cut over
        self._before: tuple[int | None, int] = None, 0  # its `limit_epoch` and `last_used` then

    def sync(self, layer: ElasticLayer, copier: Callable[[KVPool], CopyEngine], pace: RateLimiter) -> None:
        """Copy what the layer holds and the new place has not, beside whatever the layer does."""
        held = layer.held()
        if held is None or not held.length:
            return
        target = self._open(layer, held)
        for lease in (held.lease, target):
            finish_queued_work(lease.pool.device)
        step = held.length if pace.bytes_per_s is None else max(1, pace.CHUNK // held.lease.store.token_bytes)
        for start in range(self._copied, held.length, step):
            stop = min(start + step, held.length)
            if not self._copy_beside(layer, start, stop, copier(held.lease.pool), pace):
                return

    def cut_over(self, layer: ElasticLayer) -> None:
        """Have the layer hold its tokens at the new place."""
        with layer.lock:
            held = layer.held()
            self._before = layer.limit_epoch, layer.last_used
            layer.limit_epoch = FROM_ELSEWHERE
            if held is None:
                return
            if not held.length:
                layer.give_up()
                return
            with on_stream(held.lease.store.stream):
                target = self._open(layer, held)
                for pair in self._pairs(layer, self._copied, held.length):
                    copy_engine.copy(*pair)
            self._previous = held
            layer.exchange(target, self._origin)

    def revert(self, layer: ElasticLayer) -> None:
        """Undo `cut_over`, if it was called; what changed after it goes back by way of host memory, at its next use."""
        with layer.lock:
            held, previous = layer.held(), self._previous
            limit_epoch, last_used = self._before
            unchanged = held is not None and held.lease is self._target and layer.last_used == last_used
            if previous is not None and unchanged:
                layer.exchange(previous.lease, previous.origin)
                layer.limit_epoch, self._previous = limit_epoch, None
            elif layer.is_on(self._pool):
                layer.evict_to_host()
        self.finish()

    def finish(self) -> int:
        """Give up what the layer does not hold; return the bytes there that tensors outside still show."""
        if self._previous is not None:
            return self._previous.lease.end()
        if self._target is not None:
            self._target.end()
        return 0

    def _open(self, layer: ElasticLayer, held: HeldTokens) -> StoreLease:
        """Return the lease at the new place, with room for all that is held; another one if what it has is void."""
        if self._target is not None and self._epoch != held.epoch:
            self._target.end()
            self._target = None
        if self._target is None:
            self._target = self._pool.lease(*self._memory.geometries_at(self._pool, held), layer)
            self._epoch, self._origin, self._copied = held.epoch, held.first, held.first
        elif self._pool.device == held.lease.pool.device:
            self._target.store.stream = held.lease.store.stream  # all copies so far are done
        self._target.hold(0, held.length - self._origin)
        self._target.store.limit_epoch = FROM_ELSEWHERE
        return self._target

    def _copy_beside(self, layer: ElasticLayer, start: int, stop: int, engine: CopyEngine, pace: RateLimiter) -> bool:
        """Copy the tokens [start, stop), whatever the layer does meanwhile; return whether what was copied counts.

        On a GPU kernels that overwrite what the copy reads wait for it; what they had overwritten by now is void.
        """
        pairs: list[Pair] = []
        try:
            with layer.lock:
                held, pairs = layer.held(), self._pairs(layer, start, stop)
                store = held.lease.store if held is not None and pairs else None
                if store is not None and store.stream is not None:
                    assert isinstance(engine, StreamCopyEngine)
                    issued = engine.copy(pairs, RateLimiter())
                    store.reader = issued.event
            if store is None:
                return False
            if store.stream is None:
                engine.copy(pairs, pace).finish()
            else:
                pace.acquire(sum(target.nbytes for target, _ in pairs))
                issued.finish()
            return True
        finally:
            pairs.clear()  # an error would keep them, and so the pages

    def _pairs(self, layer: ElasticLayer, start: int, stop: int) -> list[Pair]:
        """Pair the tokens [start, stop), as far as the window has not left them; none if what was copied is void."""
        assert self._target is not None
        with layer.lock:
            held = layer.held()
            if held is None or held.epoch != self._epoch:
                return []
            with held.lease.pool.lock:  # a forward pass may have let its window slide on since, and given pages back
                start = min(stop, max(start, held.first, held.origin + held.lease.store.start))
                sources = held.lease.views(start - held.origin, stop - held.origin)
        targets = self._target.views(start - self._origin, stop - self._origin)
        self._copied = stop
        self.moved_bytes += sum(source.nbytes for source in sources)
        return list(zip(targets, sources, strict=True))
