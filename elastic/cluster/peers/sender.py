"""Hidden states to one other rank, over a connection that goes that way only."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from elastic.cluster.control.connection import hang_up
from elastic.cluster.peers.frames import GOODBYE
from elastic.errors import ElasticError, RankLost


class HiddenStatesSender:
    """Sends frames in order. Thread-safe.

    What the kernel takes at once is sent by the caller; the rest, and what comes before the connection stands, by a
    thread of its own. So a rank that does not read, or is stopped, keeps nobody waiting.
    """

    def __init__(
        self,
        rank: str,
        connect: Callable[[int], socket.socket],
        failed: Callable[[str], None],
        numbers: Iterator[int],
    ) -> None:
        """`connect` may wait and raise; it is given the connection's number, the next of `numbers`.

        `failed` is called with the reason, by a thread, when the rank has gone.
        """
        self._rank, self._connect, self._failed, self._numbers = rank, connect, failed, numbers
        self._changed = threading.Condition()
        self._stream: socket.socket | None = None
        self.backlog: deque[bytes] = deque()
        """What waits to be sent. The first one is being sent, from where on only its thread knows."""
        self._thread: threading.Thread | None = None
        self._opening = False
        self._over = ""

    def open(self) -> None:
        """Connect, beside the caller: the other rank then knows this end for a new one."""
        with self._changed:
            self._reconnect_if_ended()
            self._opening = True
            self._wake()

    def send(self, parts: Sequence[memoryview]) -> None:
        """Send the parts of a frame. Raises `RankLost`."""
        with self._changed:
            if self._over:
                raise RankLost(self._over, rank=self._rank)
            self._reconnect_if_ended()
            sent = 0 if self._stream is None or self.backlog else self._send_now(self._stream, parts)
            if sent < sum(map(len, parts)):
                self.backlog.append(b"".join(parts)[sent:])
                self._wake()

    def end(self, reason: str, grace_s: float = 0.0) -> None:
        """Send nothing more: the rank was lost, or this end is closed. Can be called twice; the first reason counts.

        The frame that is being sent has so long to be sent to its end; without that the other rank sees no goodbye.
        """
        with self._changed:
            ended, self._over = bool(self._over), self._over or reason
            self._changed.notify_all()
            if ended or self._stream is None:
                return
            if self.backlog and not self._changed.wait_for(lambda: self._stream is None, grace_s):
                hang_up(self._stream)  # its thread closes it
            elif self._stream is not None:
                self._say_goodbye()

    def _reconnect_if_ended(self) -> None:
        """Have a new connection made if the other end closed the one that stands: it may be there for a later one.

        While there is a backlog its thread does that, between two frames.
        """
        if not self.backlog:
            self._close_if_ended()

    def _close_if_ended(self) -> None:
        if self._stream is None:
            return
        try:
            ended = not self._stream.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        except BlockingIOError:
            ended = False
        except OSError:
            ended = True
        if ended:
            self._close()

    def _send_now(self, stream: socket.socket, parts: Sequence[memoryview]) -> int:
        try:
            return stream.sendmsg(parts, [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            self._close()
            return 0

    def _wake(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._write, name="elastic-peer-sender", daemon=True)
            thread.start()  # where none can be had, the next call tries again
            self._thread = thread
        self._changed.notify_all()

    def _write(self) -> None:
        """Connect, and send the backlog, until the end."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.backlog or self._over or self._opening)
                self._opening = False
                if self._over:
                    self._say_goodbye()
                    return
                self._close_if_ended()
                connected = self._stream is not None
                number = next(self._numbers)  # below those of whoever is made once this one is over
            try:
                made = None if connected else self._connect(number)
            except (OSError, ElasticError) as error:
                with self._changed:
                    self._over = self._over or f"rank {self._rank!r} cannot be reached: {error}"
                self._failed(self._over)
                return
            with self._changed:
                stream = self._stream = made or self._stream  # which another thread may have found ended meanwhile
                frame = self.backlog[0] if self.backlog and not self._over else None
            if stream is not None and frame is not None:
                self._send_all(stream, frame)

    def _send_all(self, stream: socket.socket, frame: bytes) -> None:
        """Send the first frame of the backlog. If the stream ends, so did the end that the backlog was for."""
        try:
            stream.sendall(frame)
        except OSError:
            with self._changed:
                self.backlog.clear()
                self._close()
                self._opening = True  # where nobody is there, it is lost
        else:
            with self._changed:
                self.backlog.popleft()

    def _say_goodbye(self) -> None:
        """Close the connection between two frames."""
        if self._stream is not None:
            with suppress(OSError):  # it has gone, or does not read
                self._stream.send(GOODBYE, socket.MSG_DONTWAIT)
            self._close()

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
            self._changed.notify_all()
