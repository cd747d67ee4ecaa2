"""Hidden states, and parts of them, between ranks of one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from elastic.engines.pipeline.transport import Key, StepFailure
from elastic.errors import RankLost, StateError

Box = tuple[str, str, str, Key]


class QueueExchange:
    """What is on its way between ranks of this process, of any number of instances. Thread-safe."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.boxes: dict[Box, torch.Tensor] = {}
        """Home, sender, receiver, key -> what was sent."""
        self.failed: dict[tuple[str, str, str, int], StepFailure] = {}
        """Home, sender, receiver, step."""
        self.forgotten: set[tuple[str, str, int]] = set()
        """Home, receiver, step."""
        self.gone: set[str] = set()
        self.closed: set[tuple[str, str]] = set()
        """Home, rank: ends that were closed."""

    def transport(self, rank: str, home: str) -> QueueTransport:
        """Return a rank's end for the instance of a home, a new one."""
        with self.changed:
            self.closed.discard((home, rank))
        return QueueTransport(self, rank, home)

    def lost(self, rank: str) -> None:
        """Have every call for a rank raise `RankLost`, from now on."""
        with self.changed:
            self.gone.add(rank)
            self.changed.notify_all()


class QueueTransport:
    """A `Transport` within a process."""

    def __init__(self, exchange: QueueExchange, rank: str, home: str) -> None:
        self._exchange, self._rank, self._home = exchange, rank, home
        self._closed = False

    def send(self, to: str, hidden: torch.Tensor, key: Key) -> None:
        """Send a tensor; see `Transport`."""
        with self._telling(to, key.step) as wanted:
            if wanted:
                self._exchange.boxes[self._home, self._rank, to, key] = hidden.clone()

    def receive(self, frm: str, like: torch.Tensor, key: Key) -> torch.Tensor:
        """Wait for a tensor; see `Transport`. Raises `StateError` for another than is expected."""
        exchange, box = self._exchange, (self._home, frm, self._rank, key)
        step = (*box[:3], key.step)
        with exchange.changed:
            exchange.changed.wait_for(
                lambda: box in exchange.boxes or step in exchange.failed or self._closed or self._has_gone(frm)
            )
            if self._closed or box not in exchange.boxes:
                if not self._closed and step in exchange.failed:
                    raise exchange.failed[step].error()
                self._require(frm)
            hidden = exchange.boxes.pop(box)
        if (hidden.shape, hidden.dtype) != (like.shape, like.dtype):
            raise StateError(
                f"rank {frm!r} sent {hidden.dtype} {tuple(hidden.shape)} as {key}, expected were {like.dtype} "
                f"{tuple(like.shape)}; the ranks do not compute the same step"
            )
        return hidden.to(like.device)

    def fail(self, to: str, step: int, failure: StepFailure) -> None:
        """Say that nothing more of a step will come; see `Transport`."""
        with self._telling(to, step) as wanted:
            if wanted:
                self._exchange.failed[self._home, self._rank, to, step] = failure

    def forget(self, step: int) -> None:
        """Keep nothing of a step; see `Transport`."""
        with self._exchange.changed:
            self._exchange.forgotten.add((self._home, self._rank, step))
            self._drop(step)

    def close(self) -> None:
        """End it; see `Transport`."""
        with self._exchange.changed:
            if self._closed:
                return
            self._closed = True
            self._exchange.closed.add((self._home, self._rank))
            self._drop(None)
            self._exchange.changed.notify_all()

    @contextmanager
    def _telling(self, to: str, step: int) -> Iterator[bool]:
        """Change what a rank is told of a step; yields whether it wants to know."""
        exchange = self._exchange
        with exchange.changed:
            self._require(to)
            yield (self._home, to, step) not in exchange.forgotten
            exchange.changed.notify_all()

    def _drop(self, step: int | None) -> None:
        """Drop what came for this rank of a step; None: of all."""
        own = self._home, self._rank
        for home, frm, to, key in [*self._exchange.boxes]:
            if (home, to) == own and step in (None, key.step):
                del self._exchange.boxes[home, frm, to, key]
        for home, frm, to, failed in [*self._exchange.failed]:
            if (home, to) == own and step in (None, failed):
                del self._exchange.failed[home, frm, to, failed]

    def _require(self, rank: str) -> None:
        if self._closed:
            raise RankLost(f"the transport of {self._home!r} at {self._rank!r} was closed", rank=rank)
        if self._has_gone(rank):
            raise RankLost(f"rank {rank!r} was lost", rank=rank)

    def _has_gone(self, rank: str) -> bool:
        return rank in self._exchange.gone or (self._home, rank) in self._exchange.closed
