"""Hidden states to one other rank, over a connection that goes that way only."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from elastic.cluster.peers.frames import GOODBYE
from elastic.errors import ElasticError, RankLost


class HiddenStatesSender:
    """Sends frames in order. Thread-safe.

    What the kernel takes at once is sent by the caller; the rest, and what comes before the connection stands, by a
    thread of its own. So a rank that does not read, or is stopped, keeps nobody waiting.
    """

    def __init__(self, rank: str, connect: Callable[[], socket.socket], failed: Callable[[str], None]) -> None:
        """`connect` may wait and raise; `failed` is called with the reason, by a thread, when the rank has gone."""
        self._rank, self._connect, self._failed = rank, connect, failed
        self._changed = threading.Condition()
        self._stream: socket.socket | None = None
        self._backlog: deque[bytes] = deque()  # the first one is being sent, from where on only its thread knows
        self._thread: threading.Thread | None = None
        self._over = ""

    def send(self, parts: Sequence[memoryview]) -> None:
        """Send the parts of a frame. Raises `RankLost`."""
        with self._changed:
            if self._over:
                raise RankLost(self._over, rank=self._rank)
            self._reconnect_if_ended()
            if self._stream is None or self._backlog:
                self._queue(b"".join(parts))
                return
            sent = self._send_now(self._stream, parts)
            if sent < sum(map(len, parts)):
                self._queue(b"".join(parts)[sent:])

    def end(self, reason: str) -> None:
        """Send nothing more: the rank was lost, or this end is closed. Can be called twice; the first reason counts."""
        with self._changed:
            orderly = self._stream is not None and not self._backlog
            if self._stream is not None and not self._over:
                with suppress(OSError):  # it has gone
                    if orderly:
                        self._stream.send(GOODBYE, socket.MSG_DONTWAIT)
                    self._stream.shutdown(socket.SHUT_RDWR)
                if orderly:
                    self._close()  # else its thread does
            self._over = self._over or reason
            self._changed.notify_all()

    def _reconnect_if_ended(self) -> None:
        """Have a new connection made if the other end closed the one that stands: it may be there for a later one."""
        if self._stream is None or self._backlog:
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
        except OSError as error:
            self._over = f"rank {self._rank!r} has gone: {error.strerror or error}"
            self._close()
            raise RankLost(self._over, rank=self._rank) from error

    def _queue(self, frame: bytes) -> None:
        self._backlog.append(frame)
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="elastic-peer-sender", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _write(self) -> None:
        """Send the backlog, until the end."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._backlog or self._over)
                stream, over = self._stream, self._over
                if over:
                    self._close()
                    return
                frame = self._backlog[0]
            try:
                if stream is None:
                    stream = self._connect()
                    with self._changed:
                        self._stream = stream
                        if self._over:
                            continue
                stream.sendall(frame)
            except (OSError, ElasticError) as error:
                with self._changed:
                    self._over = self._over or f"rank {self._rank!r} cannot be reached: {error}"
                    self._close()
                self._failed(self._over)
                return
            with self._changed:
                self._backlog.popleft()

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
