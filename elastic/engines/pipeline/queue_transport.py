"""Hidden states between ranks of one process."""

from __future__ import annotations

import threading

import torch

from elastic.engines.pipeline.transport import Key, StepFailure
from elastic.errors import RankLost, StateError

Box = tuple[str, str, str, Key]


class QueueExchange:
    """What is on its way between ranks of this process, of any number of instances. Thread-safe."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.boxes: dict[Box, torch.Tensor | StepFailure] = {}
        """Home, sender, receiver, key -> hidden states."""
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
        """Send hidden states; see `Transport`."""
        self._put(to, key, hidden.clone())

    def receive(self, frm: str, like: torch.Tensor, key: Key) -> torch.Tensor:
        """Wait for hidden states; see `Transport`. Raises `StateError` for others than are expected."""
        exchange, box = self._exchange, (self._home, frm, self._rank, key)
        with exchange.changed:
            exchange.changed.wait_for(lambda: box in exchange.boxes or self._closed or self._has_gone(frm))
            if self._closed or box not in exchange.boxes:
                self._require(frm)
            hidden = exchange.boxes.pop(box)
        if isinstance(hidden, StepFailure):
            raise hidden.error()
        if (hidden.shape, hidden.dtype) != (like.shape, like.dtype):
            raise StateError(
                f"rank {frm!r} sent {hidden.dtype} {tuple(hidden.shape)} as {key}, expected were {like.dtype} "
                f"{tuple(like.shape)}; the ranks do not compute the same step"
            )
        return hidden.to(like.device)

    def fail(self, to: str, key: Key, failure: StepFailure) -> None:
        """Say that hidden states will not come; see `Transport`."""
        self._put(to, key, failure)

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

    def _put(self, to: str, key: Key, what: torch.Tensor | StepFailure) -> None:
        exchange = self._exchange
        with exchange.changed:
            self._require(to)
            if (self._home, to, key.step) not in exchange.forgotten:
                exchange.boxes[self._home, self._rank, to, key] = what
                exchange.changed.notify_all()

    def _drop(self, step: int | None) -> None:
        """Drop what came for this rank of a step; None: of all."""
        for home, frm, to, key in [*self._exchange.boxes]:
            if (home, to) == (self._home, self._rank) and step in (None, key.step):
                del self._exchange.boxes[home, frm, to, key]

    def _require(self, rank: str) -> None:
        if self._closed:
            raise RankLost(f"the transport of {self._home!r} at {self._rank!r} was closed", rank=rank)
        if self._has_gone(rank):
            raise RankLost(f"rank {rank!r} was lost", rank=rank)

    def _has_gone(self, rank: str) -> bool:
        return rank in self._exchange.gone or (self._home, rank) in self._exchange.closed
