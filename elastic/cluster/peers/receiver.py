"""Hidden states from one other rank."""

from __future__ import annotations

import socket
import time

from elastic.cluster.control.connection import hang_up
from elastic.cluster.peers import frames
from elastic.cluster.peers.mailbox import Mailbox, What
from elastic.engines.pipeline.transport import Key
from elastic.errors import RankLost

REOPENED_S = 5.0
"""How long the next connection of a rank that has closed its end is waited for: its host may be busy."""


class HiddenStatesReceiver:
    """Frames by their keys. Thread-safe.

    One of those that wait reads for all, so that no thread is between the stream and the forward pass. The other rank
    connects. When it has closed its end it may make another: a later connection takes the place of an earlier one, and
    is waited for a while.
    """

    def __init__(self, rank: str) -> None:
        self.box = Mailbox(rank)
        self._changed = self.box.changed
        self._stream: socket.socket | None = None
        self._connection = -1  # its number, as the other rank counts
        self._reading = False
        self._left_s: float | None = None  # when it was seen that the other end was closed
        self._over = False

    def attach(self, stream: socket.socket, connection: int) -> None:
        """Read from a stream from now on, unless there was a later one."""
        with self._changed:
            if self._over or connection < self._connection:
                stream.close()
                return
            self._detach()
            self._stream, self._connection = stream, connection
            self._left_s, self.box.lost = None, ""
            self._changed.notify_all()

    def receive(self, key: Key) -> What:
        """Wait for what comes for a key. Raises `RankLost`."""
        while True:
            with self._changed:
                if (what := self.box.take(key)) is not None:
                    return what
                if self._stream is None or self._reading:
                    self._changed.wait(self._patience_s())
                    continue
                stream, self._reading = self._stream, True
            self._read(stream)

    def end(self, reason: str) -> None:
        """Receive nothing more: the rank was lost, or this end is closed. Can be called twice."""
        with self._changed:
            self._over = True
            self._detach()
        self.box.end(reason)

    def _patience_s(self) -> float | None:
        """Return how long another connection is waited for. Raises `RankLost` where it was long enough."""
        if self._left_s is None:
            return None
        patience_s = self._left_s + REOPENED_S - time.monotonic()
        if patience_s <= 0:
            raise RankLost(f"rank {self.box.rank!r} has closed its transport", rank=self.box.rank)
        return patience_s

    def _read(self, stream: socket.socket) -> None:
        """Read one frame for whoever waits for it."""
        frame, end = None, None
        try:
            frame = frames.read(stream)
        except frames.EndOfStream as error:
            end = error
        finally:
            with self._changed:
                self._reading = False
                if stream is not self._stream:  # another has taken its place meanwhile
                    stream.close()
                elif frame is not None:
                    self.box.put(*frame)
                else:
                    self._detach()
                    if isinstance(end, frames.OrderlyEnd):
                        self._left_s = time.monotonic()
                    else:
                        self.box.lost = f"rank {self.box.rank!r} has gone: its connection has ended"
                self._changed.notify_all()

    def _detach(self) -> None:
        """Have no stream; whoever reads in it comes out, and closes it."""
        stream, self._stream = self._stream, None
        if stream is None:
            return
        if self._reading:
            hang_up(stream)
        else:
            stream.close()
