"""Hidden states between ranks of one process."""

from __future__ import annotations

import threading

import torch

from elastic.engines.pipeline.transport import Key
from elastic.errors import RankLost, StateError

Box = tuple[str, str, str, Key]


class QueueExchange:
    """What is on its way between ranks of this process, of any number of instances. Thread-safe."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.boxes: dict[Box, torch.Tensor] = {}
        """Home, sender, receiver, key -> hidden states."""
        self.gone: set[str] = set()

    def transport(self, rank: str, home: str) -> QueueTransport:
        """Return a rank's end for the instance of a home."""
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
        exchange = self._exchange
        with exchange.changed:
            self._require(to)
            exchange.boxes[self._home, self._rank, to, key] = hidden.clone()
            exchange.changed.notify_all()

    def receive(self, frm: str, like: torch.Tensor, key: Key) -> torch.Tensor:
        """Wait for hidden states; see `Transport`. Raises `StateError` for others than are expected."""
        exchange, box = self._exchange, (self._home, frm, self._rank, key)
        with exchange.changed:
            exchange.changed.wait_for(lambda: box in exchange.boxes or self._closed or frm in exchange.gone)
            if self._closed or box not in exchange.boxes:
                self._require(frm)
            hidden = exchange.boxes.pop(box)
        if (hidden.shape, hidden.dtype) != (like.shape, like.dtype):
            raise StateError(
                f"rank {frm!r} sent {hidden.dtype} {tuple(hidden.shape)} as {key}, expected were {like.dtype} "
                f"{tuple(like.shape)}; the ranks do not compute the same step"
            )
        return hidden.to(like.device)

    def close(self) -> None:
        """End it; see `Transport`."""
        with self._exchange.changed:
            self._closed = True
            for home, frm, to, key in [*self._exchange.boxes]:
                if (home, to) == (self._home, self._rank):
                    del self._exchange.boxes[home, frm, to, key]
            self._exchange.changed.notify_all()

    def _require(self, rank: str) -> None:
        if self._closed:
            raise RankLost(f"the transport of {self._home!r} at {self._rank!r} was closed", rank=rank)
        if rank in self._exchange.gone:
            raise RankLost(f"rank {rank!r} was lost", rank=rank)
