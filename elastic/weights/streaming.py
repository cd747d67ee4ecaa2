"""Streaming: absent layers that are called are copied into prefetch buffers, the next one while the present computes.

A buffer has room for any layer of its place. While a forward pass is in the layer that it holds, it is not touched;
else the buffer whose layer is called farthest from now, in the order of the layers, gives way. (Of two buffers that is
the one used longest ago. Of more it is not: layers are called in a circle, and the one used longest ago is the one that
is needed next.)
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from elastic.errors import ElasticError
from elastic.memory.backends.streams import finish_queued_work
from elastic.memory.copy_engine import CopyEngine, CopyHandle
from elastic.memory.pages.page_pool import PagePool
from elastic.memory.weight_buffer import WeightBuffer
from elastic.weights import batch_context
from elastic.weights.layer import Absence, WeightUnit

logger = logging.getLogger(__name__)
OWNER = "staging"
MOST_BUFFERS = 2
"""Buffers of a place: one for the layer that computes, one for the next."""
NOT_AHEAD = "pages for absent layers of %s were not made ahead: %s"
"""Logged: it is raised again for whoever calls such a layer, if it lasts."""


LOOK_S = 0.1
"""Seconds after which those who wait for a buffer look for users that died."""


class BufferUser(Protocol):
    """A forward pass in the layer that a buffer holds."""

    @property
    def died(self) -> bool:
        """Whether it is over for sure, although its modules may not have said so."""


class PrefetchBuffer:
    """A block, the unit whose copy is in it or on its way, and who is inside that unit's layer."""

    def __init__(self) -> None:
        self.block: WeightBuffer | None = None
        self.charged = True
        """Whether its pages are counted, though not created yet."""
        self.layer: WeightUnit | None = None
        self.tensors: Mapping[str, torch.Tensor] = {}
        self.copy: CopyHandle | None = None
        self.users: list[BufferUser | None] = []
        """Those inside the unit's layer; None: one of whom nothing is known."""
        self.writes = 0
        """How often the unit had been written when the copy began."""
        self.stale = False
        """Whether its contents are not to be used again."""
        self.used: list[torch.cuda.Event] = []
        """CUDA: after these nobody reads its contents."""


class WeightStreamer:
    """The prefetch buffers of one place. Thread-safe.

    `layers` are the model's, as they are now. A buffer is counted in the ledger as `staging` from the start; its pages
    are created for a release, or at its first use.
    """

    def __init__(self, pool: PagePool, copier: CopyEngine, buffer_bytes: int, layers: Sequence[WeightUnit]) -> None:
        self.pool = pool
        self.buffer_bytes = buffer_bytes
        """Bytes of the largest layer of the model: any of them may come here."""
        self.buffer_pages = pool.pages_for(buffer_bytes)
        """Pages of one buffer."""
        self.on_spare: Callable[[int], object] = lambda pages: None
        """Called with the pages of a buffer that was in use when it became one too many."""
        self.copier = copier
        self._layers = layers
        self.buffers: list[PrefetchBuffer] = []
        self._wanted = 0
        self.least = 1
        """Buffers that are kept while no layer is absent, so that there is one when a layer is released."""
        self.awaited = 0
        """Releases that are prepared: a buffer is kept for them."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        """Taken by its lock: its own `__enter__` may be interrupted with the lock held."""
        self._thread = _EnteredBuffers()

    @property
    def fewest(self) -> int:
        """The number of buffers that are kept although no layer is absent."""
        return max(self.least, min(1, self.awaited))

    # -- in the thread of a forward pass

    def enter(self, layer: WeightUnit, user: BufferUser | None = None) -> None:
        """Have an absent layer in a buffer until `leave`, and the next absent one on its way.

        `user`: the forward pass; one that dies without its hooks is taken out when others wait. Raises `CapacityError`
        if a buffer finds no pages.
        """
        with self._lock:
            while (buffer := self._buffer_for(layer)) is None:
                if not self._changed.wait(LOOK_S):
                    self._forget_died()
            buffer.users.append(user)
            copy = buffer.copy
        try:
            with self._lock:
                self._prefetch_after(layer)
            assert copy is not None
            copy.wait()
        except BaseException:
            del copy  # it knows the error, which knows this frame, and so all the forward's tensors
            with self._lock:
                buffer.stale = True  # the next one who needs the layer has it copied again
                self._release(buffer, user)
                for other in [buffer for buffer in self.buffers if not buffer.users]:
                    self._empty(other)  # the next layer may have failed to come for the same reason
            raise
        layer.prefetched.tensors = buffer.tensors
        self._thread.entered.append((buffer, layer, user))

    def leave(self, layer: WeightUnit) -> None:
        """End the forward of a layer, and of what it contains. One that was not entered is ignored."""
        entered, device = self._thread.entered, self.pool.backend.device
        if not any(unit is layer for _, unit, _ in entered):
            return
        unit = None
        while unit is not layer:
            buffer, unit, user = entered.pop()
            unit.prefetched.tensors = None
            with self._lock:
                if device.type == "cuda":
                    buffer.used.append(torch.cuda.current_stream(device).record_event())
                self._release(buffer, user)

    def leave_all(self) -> None:
        """End what this thread is still in: an earlier forward pass left it without its hooks (Ctrl-C)."""
        if self._thread.entered:
            self.leave(self._thread.entered[0][1])

    # -- by actions

    def resize(self, count: int) -> int:
        """Have `count` buffers; returns how many pages others may have more (or fewer).

        A buffer in use is closed when it is left. Raises `CapacityError` for a new one that the budget has no room for.
        """
        with self._lock:
            before = len(self.buffers)
            self._wanted = count
            self._forget_died()
            while len(self.buffers) < count:
                self.pool.charge(OWNER, self.buffer_bytes)
                self.buffers.append(PrefetchBuffer())
            for buffer in [b for b in self.buffers if not b.users][: len(self.buffers) - count]:
                self._close(buffer)
            self._changed.notify_all()
            return (before - len(self.buffers)) * self.buffer_pages

    def make_ready(self, layers: int) -> None:
        """Create the pages of the buffers that so many absent layers need, as far as others leave room for them now."""
        with self._lock:
            lacking = min(MOST_BUFFERS, layers) - sum(buffer.block is not None for buffer in self.buffers)
        try:
            self.pool.make_ready(max(0, lacking) * self.buffer_pages, huge_pages=True)
        except ElasticError as error:
            logger.info(NOT_AHEAD, self.pool.name, str(error))

    def fill(self) -> None:
        """Have all buffers have their pages, so that no forward pass waits for them: those made ready, if nobody took
        them. A buffer that finds none has them at its first use."""
        with self._lock:
            try:
                for buffer in self.buffers:
                    if buffer.block is None:
                        buffer.block = self._new_block(buffer)
            except ElasticError as error:
                logger.info(NOT_AHEAD, self.pool.name, str(error))

    def forget(self, layer: WeightUnit) -> None:
        """Have no buffer hold this layer, once the forwards that read it are over."""
        with self._lock:
            for buffer in self.buffers:
                if buffer.layer is layer:
                    buffer.stale = True
                    self._tidy(buffer)

    # -- inside, under the lock

    def _streamed(self) -> list[WeightUnit]:
        """List the layers of the place that this thread may call and that are in host memory."""
        plan = batch_context.thread.plan
        return [
            unit
            for unit in self._layers
            if unit.pool is self.pool and unit.absent is Absence.HOST and (plan is None or unit.index in plan.layers)
        ]

    def _buffer_for(self, layer: WeightUnit) -> PrefetchBuffer | None:
        """Return the buffer with this layer, or one that it may have; None: wait."""
        assert self.buffers, "a place with an absent layer has a buffer"
        for buffer in self.buffers:
            if buffer.layer is layer:
                if buffer.writes != layer.writes and not buffer.users:
                    self._load(buffer, layer)
                return buffer
        free = self._next_to_give_way(layer)
        if free is not None:
            self._load(free, layer)
        return free

    def _next_to_give_way(self, layer: WeightUnit) -> PrefetchBuffer | None:
        unused = [buffer for buffer in self.buffers if not buffer.users]
        return max(unused, key=lambda buffer: self._distance(layer, buffer.layer), default=None)

    def _distance(self, layer: WeightUnit, other: WeightUnit | None) -> int:
        """Return how many layers later the other one is called next; for an empty buffer more than for any."""
        count = len(self._layers)
        return count if other is None else (other.index - layer.index) % count

    def _prefetch_after(self, layer: WeightUnit) -> None:
        following = min(
            (unit for unit in self._streamed() if unit is not layer),
            key=lambda unit: self._distance(layer, unit),
            default=None,
        )
        if following is None or any(buffer.layer is following for buffer in self.buffers):
            return
        buffer = self._next_to_give_way(layer)
        if buffer is not None:
            try:
                self._load(buffer, following)
            except ElasticError as error:  # raised again for whoever calls that layer, if it lasts
                logger.info("%s was not fetched ahead: %s", following.name, str(error))

    def _load(self, buffer: PrefetchBuffer, layer: WeightUnit) -> None:
        self._empty(buffer)
        if buffer.block is None:
            buffer.block = self._new_block(buffer)
        buffer.tensors, buffer.writes = buffer.block.show(layer.layout), layer.writes
        buffer.copy = self.copier.start(layer.sources(buffer.tensors), after=buffer.used)
        buffer.used = []
        buffer.layer = layer

    def _new_block(self, buffer: PrefetchBuffer) -> WeightBuffer:
        block = WeightBuffer(self.pool, self.buffer_bytes)
        with self.pool.mapping_lock:  # nobody takes the pages in between
            if buffer.charged:
                self.pool.discharge(OWNER, self.buffer_bytes)
            try:
                block.allocate(OWNER)
            except BaseException:
                block.close()
                if buffer.charged:
                    self.pool.charge(OWNER, self.buffer_bytes)
                raise
        buffer.charged = False
        return block

    def _empty(self, buffer: PrefetchBuffer) -> None:
        """Drop the contents of a buffer that nobody uses. A block that tensors outside show is given up."""
        if buffer.layer is None:
            return
        buffer.layer, buffer.stale, buffer.tensors = None, False, {}
        if buffer.copy is not None:
            buffer.copy.discard()
            buffer.copy = None
        if buffer.block is not None and not buffer.block.hide():
            buffer.block.orphan(lambda pages: None)
            buffer.block = None

    def _close(self, buffer: PrefetchBuffer) -> None:
        self._empty(buffer)
        self.buffers.remove(buffer)
        if buffer.block is not None:
            buffer.block.close()
        elif buffer.charged:
            self.pool.discharge(OWNER, self.buffer_bytes)

    def _release(self, buffer: PrefetchBuffer, user: BufferUser | None) -> None:
        """End one forward pass's use of a buffer; that of one that was forgotten has ended."""
        if user in buffer.users:
            buffer.users.remove(user)
            self._tidy(buffer)
            self._changed.notify_all()

    def _forget_died(self) -> None:
        """End the use of buffers by forward passes that nobody will end, and by what these have queued."""
        died = [(buffer, user) for buffer in self.buffers for user in buffer.users if user is not None and user.died]
        if died:
            finish_queued_work(self.pool.backend.device)
        for buffer, user in died:
            self._release(buffer, user)

    def _tidy(self, buffer: PrefetchBuffer) -> None:
        """Close a buffer that nobody uses if there are too many, or else drop stale contents."""
        if buffer.users:
            return
        if len(self.buffers) > self._wanted:
            self._close(buffer)
            self.on_spare(self.buffer_pages)
            self.pool.notify()
        elif buffer.stale:
            self._empty(buffer)


class _EnteredBuffers(threading.local):
    """The buffers that a thread uses, the units in them and the forward passes, outermost first."""

    def __init__(self) -> None:
        self.entered: list[tuple[PrefetchBuffer, WeightUnit, BufferUser | None]] = []
