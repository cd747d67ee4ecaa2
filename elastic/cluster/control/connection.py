"""Two ends that messages go between: over a socket, or within a process.

Over a socket each message is one pickle (protocol 5) in a frame of `multiprocessing.connection`. What is received is
unpickled, so whoever can send can run code: `control.listener` lets nobody come so far without the key.
"""

from __future__ import annotations

import os
import pickle
import queue
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection as Pipe
from typing import Any, Protocol

from elastic.errors import ConfigError, StateError

MOST_BYTES = 1 << 30
"""The bound on one message. Prompts are the largest; KV does not travel here."""

LOST_MS, QUIET_S = 60_000, 20
"""After how long without a word from the other host a connection is given up, in milliseconds, and after how many
seconds in which nothing was said the system asks for one: else who only receives would not see that it has gone."""

Inbox = queue.SimpleQueue[bytes | None]
"""Pickled messages; None: the end."""


class Connection(Protocol):
    """One end. Messages come whole, once and in order. Thread-safe."""

    local_host: str
    """The address of this host by which the other end reaches it; "": both are of one host."""

    def send(self, message: Any) -> None:
        """Send a message; it may wait for the other end to read.

        Raises `StateError` after either end was closed, `ConfigError` for what cannot be pickled or is too long: then
        nothing was sent.
        """
        self.send_bytes(encode(message))

    def send_bytes(self, encoded: bytes) -> None:
        """Send a message that `encode` returned; see `send`."""

    @property
    def pending(self) -> bool:
        """Whether something has come that `receive` has not taken yet."""

    def receive(self) -> Any:
        """Return the next message; it waits for it.

        Raises `EOFError` after either end was closed, when all that was sent before has been received, and
        `StateError` for what is no message.
        """

    def close(self) -> None:
        """End it for both; whoever waits in `send` or `receive` returns. Can be called twice."""


def encode(message: Any) -> bytes:
    """Pickle a message. Raises `ConfigError` for what cannot be pickled or is too long."""
    try:
        encoded = pickle.dumps(message, 5)
    except Exception as error:  # pickle raises errors of many kinds, and objects raise their own while it asks them
        what = type(message).__name__
        raise ConfigError(f"{what} cannot be sent to another process: {error}; give what can be pickled") from error
    if len(encoded) > MOST_BYTES:
        raise ConfigError(f"{type(message).__name__} of {len(encoded):,} bytes; a message has at most {MOST_BYTES:,}")
    return encoded


def decode(encoded: bytes) -> Any:
    """Unpickle a message. Raises `StateError` for what is none."""
    try:
        return pickle.loads(encoded)
    except Exception as error:  # bytes that are no pickle raise errors of any kind
        raise StateError(
            f"{len(encoded):,} bytes came that are no message ({type(error).__name__}: {error}); "
            "see that the same version of elastic, and the modules of what was sent, are on both sides"
        ) from error


class SocketConnection(Connection):
    """One end of a connected stream socket, which it owns from then on, and closes where it cannot be made."""

    def __init__(self, stream: socket.socket) -> None:
        """Raises `OSError` where there are no descriptors left."""
        try:
            stream.setblocking(True)
            if stream.family != socket.AF_UNIX:
                with suppress(OSError):  # the other end has gone already: the first word says so
                    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_MS)
                    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, QUIET_S)
                    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, QUIET_S)
                    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            descriptor = os.dup(stream.fileno())
        except OSError:
            stream.close()
            raise
        self._socket = stream
        self.local_host = "" if stream.family == socket.AF_UNIX else str(stream.getsockname()[0])
        self.pipe = Pipe(descriptor)
        """The frames; for the handshake, before anything is sent or received."""
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._closed = False

    def receive(self) -> Any:
        """Return the next message; see `Connection`."""
        return decode(self.receive_bytes(MOST_BYTES))

    def send_bytes(self, encoded: bytes) -> None:
        """Send bytes as they are. Raises `StateError` after either end was closed."""
        with self._sending:
            if self._closed:
                raise StateError("the connection was closed")
            try:
                self.pipe.send_bytes(encoded)
            except (OSError, ValueError) as error:
                raise StateError(f"the connection has ended: {error}") from error

    def receive_bytes(self, most: int) -> bytes:
        """Return the bytes that were sent together. Raises `EOFError` after an end, `StateError` for more than that."""
        with self._receiving:
            if self._closed:
                raise EOFError("the connection was closed")
            try:
                return self.pipe.recv_bytes(most)
            except OSError as error:
                if str(error) == "bad message length":
                    raise StateError(f"a message of more than {most:,} bytes came") from error
                raise EOFError(str(error)) from error

    @property
    def pending(self) -> bool:
        """Whether something has come, also the end; see `Connection`."""
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)
            return bool(poll.poll(0))
        except (OSError, ValueError):  # it was closed
            return False

    def wait(self, descriptor: int) -> bool:
        """Wait for a message or the end of the connection (True), or for `descriptor` to be readable (False)."""
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        try:
            poll.register(self._socket, select.POLLIN)
        except ValueError:  # it was closed here
            return True
        ready = {number for number, _ in poll.poll()}
        return descriptor not in ready or len(ready) > 1

    def detach(self) -> socket.socket:
        """Return the socket, for bytes that are no messages: it is the caller's from then on, and this end is over."""
        with self._receiving, self._sending:
            self._closed = True
            self.pipe.close()
        return self._socket

    def close(self) -> None:
        """End it for both; see `Connection`."""
        self._closed = True
        hang_up(self._socket)
        with self._receiving, self._sending:  # whoever was in there has left: none uses a number that is another file's
            self.pipe.close()
            self._socket.close()


class QueueConnection(Connection):
    """One end of a pair within this process. Messages are pickled all the same: no object has two owners."""

    local_host = ""

    def __init__(self, inbox: Inbox, outbox: Inbox, over: threading.Event) -> None:
        self._inbox, self._outbox, self._over = inbox, outbox, over
        self._closed = False

    def send_bytes(self, encoded: bytes) -> None:
        """Send a message that `encode` returned; see `Connection`."""
        if self._over.is_set():
            raise StateError("the connection was closed")
        self._outbox.put(encoded)

    @property
    def pending(self) -> bool:
        """Whether something has come, also the end; see `Connection`."""
        return not self._inbox.empty()

    def receive(self) -> Any:
        """Return the next message; see `Connection`."""
        encoded = None if self._closed else self._inbox.get()
        if encoded is None:
            self._inbox.put(None)  # for whoever else waits, or asks again
            raise EOFError("the connection was closed")
        return decode(encoded)

    def close(self) -> None:
        """End it for both; see `Connection`."""
        self._closed = True
        self._over.set()
        self._outbox.put(None)
        self._inbox.put(None)


def queue_pair() -> tuple[QueueConnection, QueueConnection]:
    """Return the two ends of a connection within this process."""
    first, second, over = Inbox(), Inbox(), threading.Event()
    return QueueConnection(first, second, over), QueueConnection(second, first, over)


def hang_up(stream: socket.socket) -> None:
    """End a connection for both, whoever waits in it, unless it has ended already."""
    with suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)


@contextmanager
def in_time(timeout_s: float, end: Callable[[], object]) -> Iterator[None]:
    """Call `end` if the block is not left in time. Raises `StateError` where there is no thread to look at the time."""
    late = threading.Timer(timeout_s, end)
    late.daemon = True
    try:
        late.start()
    except RuntimeError as error:
        raise StateError(f"no thread can be started: {error}") from error
    try:
        yield
    finally:
        late.cancel()


def has_hung_up(stream: socket.socket | Pipe) -> bool:
    """Return whether the other end has closed a connection, also where what it had sent before is still to be read."""
    poll = select.poll()
    poll.register(stream, select.POLLRDHUP)
    return bool(poll.poll(0))


def receive_into(stream: socket.socket, view: memoryview) -> None:
    """Fill memory with the next bytes of a connection. Raises `OSError`, also where it ends before."""
    done = 0
    while done < len(view):
        received = stream.recv_into(view[done:], len(view) - done, socket.MSG_WAITALL)
        if not received:
            raise ConnectionResetError("its connection has ended")
        done += received


def socket_pair() -> tuple[SocketConnection, socket.socket]:
    """Return an end, and the socket of the other one, for a process that is started with it: it has no name."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        return SocketConnection(ours), theirs
    except OSError:
        theirs.close()
        raise
