"""Hidden states from one other rank."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import torch

from elastic.cluster.peers import frames
from elastic.engines.pipeline.transport import Key, StepFailure
from elastic.errors import RankLost


class HiddenStatesReceiver:
    """Frames by their keys. Thread-safe.

    One of those that wait reads for all, so that no thread is between the stream and the forward pass. The other rank
    connects; after an orderly end it may connect again, and a later connection takes the place of an earlier one.
    """

    def __init__(self, rank: str) -> None:
        self._rank = rank
        self._changed = threading.Condition()
        self._stream: socket.socket | None = None
        self._connection = -1  # its number, as the other rank counts
        self._reading = False
        self._boxes: dict[Key, torch.Tensor | StepFailure] = {}
        self._forgotten: set[int] = set()
        self._lost = ""  # why the connection that there was is no more
        self._over = ""

    def attach(self, stream: socket.socket, connection: int) -> None:
        """Read from a stream from now on, unless there was a later one."""
        with self._changed:
            if self._over or connection < self._connection:
                stream.close()
                return
            self._detach()
            self._stream, self._connection, self._lost = stream, connection, ""
            self._changed.notify_all()

    def receive(self, key: Key) -> torch.Tensor:
        """Wait for the bytes of a key, [bytes]. Raises `RankLost`, and the other rank's `StepFailure` as an error."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready(key))
                if key in self._boxes:
                    what = self._boxes.pop(key)
                    break
                if self._over or self._lost:
                    raise RankLost(self._over or self._lost, rank=self._rank)
                assert self._stream is not None
                stream, self._reading = self._stream, True
            self._read(stream)
        if isinstance(what, StepFailure):
            raise what.error()
        return what

    def forget(self, step: int) -> None:
        """Keep nothing of a step."""
        with self._changed:
            self._forgotten.add(step)
            for key in [key for key in self._boxes if key.step == step]:
                del self._boxes[key]

    def end(self, reason: str) -> None:
        """Receive nothing more: the rank was lost, or this end is closed. Can be called twice."""
        with self._changed:
            self._over = self._over or reason
            self._boxes.clear()
            self._detach()
            self._changed.notify_all()

    def _ready(self, key: Key) -> bool:
        readable = self._stream is not None and not self._reading
        return bool(key in self._boxes or self._over or self._lost or readable)

    def _read(self, stream: socket.socket) -> None:
        """Read one frame for whoever waits for it."""
        frame, end = None, None
        try:
            frame = frames.read(stream)
        except frames.Ended as error:
            end = error
        finally:
            with self._changed:
                self._reading = False
                if stream is not self._stream:  # another has taken its place meanwhile
                    stream.close()
                elif frame is not None and frame.key.step not in self._forgotten:
                    self._boxes[frame.key] = frame.what
                elif end is not None:
                    self._detach()
                    self._lost = "" if end.orderly else f"rank {self._rank!r} has gone: its connection has ended"
                self._changed.notify_all()

    def _detach(self) -> None:
        """Have no stream; whoever reads in it comes out, and closes it."""
        stream, self._stream = self._stream, None
        if stream is None:
            return
        if self._reading:
            with suppress(OSError):  # it has ended
                stream.shutdown(socket.SHUT_RDWR)
        else:
            stream.close()
