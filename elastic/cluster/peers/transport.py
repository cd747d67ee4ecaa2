"""Hidden states of one instance to and from other ranks, over sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence

import torch

from elastic.cluster.control.status import Wire
from elastic.cluster.peers import frames
from elastic.cluster.peers.mailbox import as_hidden
from elastic.cluster.peers.receiver import HiddenStatesReceiver
from elastic.cluster.peers.sender import HiddenStatesSender
from elastic.engines.pipeline.transport import Key, StepFailure
from elastic.errors import RankLost

GOODBYE_S = 1.0
"""How long a frame that is being sent may take when its end is closed."""


class TrafficCounter:
    """Counts the bytes between this rank and others. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_rank: dict[str, Wire] = {}

    def count(self, rank: str, *, sent: int = 0, received: int = 0, read: int = 0) -> None:
        """Add bytes; see `Wire`."""
        with self._lock:
            wire = self._by_rank.get(rank) or Wire(rank)
            self._by_rank[rank] = Wire(
                rank, wire.sent_bytes + sent, wire.received_bytes + received, wire.read_bytes + read
            )

    def read(self) -> tuple[Wire, ...]:
        """Return what was counted, in the order in which ranks came."""
        with self._lock:
            return tuple(self._by_rank.values())


class PeerTransport:
    """A `Transport`. Each rank and direction has a connection of its own."""

    def __init__(self, home: str, connect: Callable[[str], socket.socket], wires: TrafficCounter | None = None) -> None:
        """`connect` makes a connection to a rank for what the instance of `home` sends there; `wires` counts."""
        self.home = home
        self._connect, self._wires = connect, wires or TrafficCounter()
        self._lock = threading.Lock()
        self._senders: dict[str, HiddenStatesSender] = {}
        self._receivers: dict[str, HiddenStatesReceiver] = {}
        self.closed = False

    def send(self, to: str, hidden: torch.Tensor, key: Key) -> None:
        """Send a tensor; see `Transport`."""
        self._send(to, frames.encode(key, hidden))
        self._wires.count(to, sent=hidden.nbytes)

    def fail(self, to: str, step: int, failure: StepFailure) -> None:
        """Say that nothing more of a step will come; see `Transport`."""
        self._send(to, frames.encode_failure(step, failure))

    def receive(self, frm: str, like: torch.Tensor, key: Key) -> torch.Tensor:
        """Wait for a tensor; see `Transport`."""
        hidden = as_hidden(self._receiver(frm).receive(key), like, frm, key)
        self._wires.count(frm, received=hidden.nbytes)
        return hidden

    def forget(self, step: int) -> None:
        """Keep nothing of a step; see `Transport`."""
        with self._lock:
            receivers = [*self._receivers.values()]
        for receiver in receivers:
            receiver.box.forget(step)

    def close(self) -> None:
        """End it; see `Transport`."""
        with self._lock:
            self.closed = True
            ranks = {*self._senders, *self._receivers}
        for rank in ranks:
            self._sender(rank).end(self._closed_words, GOODBYE_S)
            self._receiver(rank).end(self._closed_words)

    # -- for the hub

    @property
    def sending(self) -> bool:
        """Whether something waits to be sent."""
        with self._lock:
            return any(sender.waiting for sender in self._senders.values())

    def open(self, rank: str) -> None:
        """Connect to a rank, beside the caller."""
        self._sender(rank).open()

    def attach(self, frm: str, stream: socket.socket, connection: int) -> None:
        """Receive what a rank sends on a stream, unless it has made a later connection."""
        self._receiver(frm).attach(stream, connection)

    def lost(self, rank: str, reason: str) -> None:
        """Have every call for a rank raise `RankLost`, now and from now on."""
        self._sender(rank).end(reason)
        self._receiver(rank).end(reason)

    def met(self, rank: str) -> None:
        """Take a rank that was lost for a new one."""
        with self._lock:
            ends = self._senders.pop(rank, None), self._receivers.pop(rank, None)
        for end in ends:
            if end is not None:
                end.end(f"rank {rank!r} was started anew")

    @property
    def _closed_words(self) -> str:
        return f"the transport of {self.home!r} was closed"

    def _send(self, to: str, parts: Sequence[memoryview]) -> None:
        try:
            self._sender(to).send(parts)
        except RankLost as error:
            self._receiver(to).end(str(error))
            raise

    def _sender(self, rank: str) -> HiddenStatesSender:
        with self._lock:
            if rank not in self._senders:
                sender = HiddenStatesSender(rank, lambda: self._connect(rank), lambda why: self.lost(rank, why))
                self._senders[rank] = sender
                if self.closed:
                    sender.end(self._closed_words)
            return self._senders[rank]

    def _receiver(self, rank: str) -> HiddenStatesReceiver:
        with self._lock:
            if rank not in self._receivers:
                self._receivers[rank] = HiddenStatesReceiver(rank)
                if self.closed:
                    self._receivers[rank].end(self._closed_words)
            return self._receivers[rank]
