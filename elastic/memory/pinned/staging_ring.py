"""Page-locked memory that bytes pass through on their way from ordinary host memory to a GPU."""

from __future__ import annotations

import logging
import threading
import weakref

import torch

from elastic.memory.pinned.page_lock import allocate, page_lock

logger = logging.getLogger(__name__)
ALIGNMENT = 64
"""Bytes. Every piece begins at a multiple: what every dtype and the host's caches need."""


class StagingRing:
    """Slots that are filled in turn, each again once the copies from it are done. For one thread and one stream.

    Its memory, `SLOTS * SLOT_BYTES`, is taken at the first use and given back by `close`.
    """

    SLOTS = 4
    SLOT_BYTES = 8 << 20
    """A third of a millisecond of PCIe 4.0 x16, and so more than it costs to begin a copy."""

    def __init__(self) -> None:
        self._slots: list[torch.Tensor] = []
        self._done: list[torch.cuda.Event | None] = [None] * self.SLOTS
        self._slot = 0
        self._filled = 0

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """Return page-locked memory in the shape and dtype of a piece of at most `SLOT_BYTES`, contiguous.

        Waits until no copy reads it any more. It is to be filled, and copied from on the current stream, before the
        next call. Raises `CapacityError` if the host has none.
        """
        if not self._slots:
            self._open()
        if self._filled + like.nbytes > self.SLOT_BYTES:
            self._turn()
        first, self._filled = self._filled, -(-(self._filled + like.nbytes) // ALIGNMENT) * ALIGNMENT
        return self._slots[self._slot][first : first + like.nbytes].view(like.dtype).view(like.shape)

    def close(self) -> None:
        """Give the memory back. No copy from it may be under way. Can be called twice."""
        self._slots.clear()
        with _lock:
            _in_use.discard(self)

    def _open(self) -> None:
        remedy = "free some, or restore the layers that are streamed"
        purpose = f"what passes through it from a checkpoint to a GPU; {remedy}"
        memory = allocate(self.SLOTS * self.SLOT_BYTES, purpose)
        if not page_lock(memory):
            logger.warning("the system refuses to page-lock memory to read checkpoints into: copies are slower")
        self._slots = list(torch.split(memory, self.SLOT_BYTES))
        with _lock:
            _in_use.add(self)

    def _turn(self) -> None:
        """Go on to the next slot, when its copies are done."""
        self._done[self._slot] = torch.cuda.current_stream().record_event()
        self._slot, self._filled = (self._slot + 1) % self.SLOTS, 0
        done = self._done[self._slot]
        if done is not None:
            done.synchronize()


_lock = threading.Lock()
_in_use: weakref.WeakSet[StagingRing] = weakref.WeakSet()


def staging_bytes() -> int:
    """Return the bytes of all rings of this process that are in use."""
    with _lock:
        return sum(ring.SLOTS * ring.SLOT_BYTES for ring in _in_use)
