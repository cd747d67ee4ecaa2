"""Hidden states of one instance to and from other ranks, over sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from elastic.cluster.control.status import Wire
from elastic.cluster.peers import frames
from elastic.cluster.peers.mailbox import as_hidden
from elastic.cluster.peers.receiver import HiddenStatesReceiver
from elastic.cluster.peers.sender import HiddenStatesSender
from elastic.engines.pipeline.transport import Key, StepFailure
from elastic.errors import RankLost

WireField = Literal["sent_bytes", "received_bytes", "read_bytes", "copied_bytes"]
GOODBYE_S = 1.0
"""How long frames that are being sent, to all ranks, may take when their end is closed."""


@dataclass(eq=False)
class TrafficCounter:
    """Counts the bytes between this rank and others. Thread-safe."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _by_rank: dict[str, Counter[str]] = field(default_factory=dict)

    def count(self, rank: str, kind: WireField, nbytes: int) -> None:
        """Add bytes to a field of the `Wire` to a rank."""
        with self._lock:
            self._by_rank.setdefault(rank, Counter())[kind] += nbytes

    def read(self) -> tuple[Wire, ...]:
        """Return what was counted, in the order in which ranks came."""
        with self._lock:
            return tuple(Wire(rank, **counts) for rank, counts in self._by_rank.items())


class PeerTransport:
    """A `Transport`. Each rank and direction has a connection of its own."""

    def __init__(
        self,
        home: str,
        connect: Callable[[str, int], socket.socket],
        wires: TrafficCounter,
        numbers: Iterator[int],
    ) -> None:
        """`connect` makes a connection to a rank, of a number, for what the instance of `home` sends there.

        `wires` counts bytes; `numbers` are those of this rank's connections, in all transports of the instance.
        """
        self._closed_words = f"the transport of {home!r} was closed"
        self._connect, self._wires, self._numbers = connect, wires, numbers
        self._lock = threading.Lock()
        self._peers: dict[str, PeerStreams] = {}
        self.closed = False

    def send(self, to: str, hidden: torch.Tensor, key: Key) -> None:
        """Send a tensor; see `Transport`."""
        self.peer(to).send(frames.encode(key, hidden))
        self._wires.count(to, "sent_bytes", hidden.nbytes)

    def fail(self, to: str, step: int, failure: StepFailure) -> None:
        """Say that nothing more of a step will come; see `Transport`."""
        self.peer(to).send(frames.encode_failure(step, failure))

    def receive(self, frm: str, like: torch.Tensor, key: Key) -> torch.Tensor:
        """Wait for a tensor; see `Transport`."""
        hidden = as_hidden(self.peer(frm).receiver.receive(key), like, frm, key)
        self._wires.count(frm, "received_bytes", hidden.nbytes)
        return hidden

    def forget(self, step: int) -> None:
        """Keep nothing of a step; see `Transport`."""
        with self._lock:
            peers = [*self._peers.values()]
        for peer in peers:
            peer.receiver.box.forget(step)

    def close(self) -> None:
        """End it; see `Transport`."""
        with self._lock:
            self.closed = True
            peers = [*self._peers.values()]
        until_s = time.monotonic() + GOODBYE_S
        for peer in peers:  # who waits is told before anybody is waited for
            peer.receiver.end(self._closed_words)
        for peer in peers:
            peer.sender.end(self._closed_words, max(0.0, until_s - time.monotonic()))

    # -- for the hub

    @property
    def sending(self) -> bool:
        """Whether something waits to be sent."""
        with self._lock:
            return any(peer.sender.backlog for peer in self._peers.values())

    def met(self, rank: str) -> None:
        """Take a rank that was lost for a new one."""
        with self._lock:
            peer = self._peers.pop(rank, None)
            if peer is not None:  # over before there is another one, whose connections so have later numbers
                peer.end(f"rank {rank!r} was started anew")

    def peer(self, rank: str) -> PeerStreams:
        """Return both ways to and from a rank, which has them made at the first call."""
        with self._lock:
            if rank not in self._peers:
                peer = self._peers[rank] = PeerStreams(rank, partial(self._connect, rank), self._numbers)
                if self.closed:
                    peer.end(self._closed_words)
            return self._peers[rank]


class PeerStreams:
    """Both ways to and from one rank. What fails of a rank that was lost ends nothing of the one started anew."""

    def __init__(self, rank: str, connect: Callable[[int], socket.socket], numbers: Iterator[int]) -> None:
        self.sender = HiddenStatesSender(rank, connect, self.end, numbers)
        self.receiver = HiddenStatesReceiver(rank)

    def send(self, parts: Sequence[memoryview]) -> None:
        """Send the parts of a frame. Raises `RankLost`; nothing more is received then."""
        try:
            self.sender.send(parts)
        except RankLost as error:
            self.receiver.end(str(error))
            raise

    def end(self, reason: str) -> None:
        """Have every call raise `RankLost`; a frame that is being sent is cut."""
        self.sender.end(reason)
        self.receiver.end(reason)
