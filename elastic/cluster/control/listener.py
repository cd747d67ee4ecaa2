"""A listener that strangers may connect to: each has a bounded time to prove that it knows the key."""

from __future__ import annotations

import logging
import math
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

from elastic.cluster.control.connection import SocketConnection, hang_up
from elastic.cluster.control.handshake import HANDSHAKE_S, compare_protocols, prove
from elastic.cluster.control.records import require_record
from elastic.errors import ConfigError, ElasticError, is_integer, require

logger = logging.getLogger(__name__)
MOST_HANDSHAKES = 32
LOOPBACK = "127.0.0.1"


class Listener:
    """Listens on an address from its making to `close`, or `end`, on threads of its own.

    `accepted` is called with the connection of each that has proven the key and speaks this protocol, on a thread of
    the listener; it returns soon. With `hello`, a class of records, one of these is to come next, in the same time, and
    is given to `accepted`, too. `refused` gets, in words, who was turned away and why. At most `most` handshakes run
    at a time: one more ends the one that has lasted longest, so that silent ones cannot keep others out.
    """

    def __init__(
        self,
        address: tuple[str, int],
        key: bytes,
        accepted: Callable[..., None],
        *,
        hello: type | None = None,
        refused: Callable[[str], None] | None = None,
        handshake_s: float = HANDSHAKE_S,
        most: int = MOST_HANDSHAKES,
    ) -> None:
        """Raises `ConfigError` for an address that cannot be listened on, `OSError` without descriptors or threads."""
        named = isinstance(address[0], str) and "\0" not in address[0]
        require(named, "host", address[0], "the name or address of a network interface")
        require(is_integer(address[1]) and 0 <= address[1] < 65536, "port", address[1], "from 0 to 65535; 0: any")
        self._key, self._accepted, self._refused = key, accepted, refused or logger.warning
        self._hello = hello
        self._handshake_s, self._most = handshake_s, most
        try:
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            self._socket = socket.create_server(address, family=family, backlog=128)
        except OSError as error:
            raise ConfigError(f"cannot listen on {address[0]}:{address[1]}: {error.strerror or error}") from error
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        """Where it listens: with the port that was chosen, if 0 was asked for."""
        self._pending: dict[socket.socket, float] = {}  # handshakes in progress -> when they must have ended
        self._lock = threading.Lock()
        self._failing = False  # whether the last one could not be accepted, which is logged once
        self._workers = ThreadPoolExecutor(most, thread_name_prefix="elastic-handshake")
        self._thread = threading.Thread(target=self._run, name="elastic-listener", daemon=True)
        with ExitStack() as undo:
            undo.callback(self._socket.close)
            self._wake, self._woken = socket.socketpair()
            undo.callback(self._wake.close)
            undo.callback(self._woken.close)
            self._thread.start()
            undo.pop_all()

    def close(self) -> None:
        """Listen no more, and end handshakes in progress. Can be called twice."""
        self.end()
        self._thread.join()
        self._workers.shutdown()

    def end(self) -> None:
        """Have it close, without waiting until it has."""
        with suppress(OSError):  # closed before
            self._wake.send(b"x")

    def _run(self) -> None:
        with self._socket, self._wake, self._woken, selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                with self._lock:
                    next_s = min(self._pending.values(), default=None)
                wait_s = None if next_s is None else max(0.0, next_s - time.monotonic())
                ready = {key.fileobj for key, _ in selector.select(wait_s)}
                self._cut(time.monotonic())
                if self._woken in ready:
                    return self._cut(math.inf)
                if self._socket in ready:
                    self._accept()

    def _accept(self) -> None:
        try:
            stream, peer = self._socket.accept()
        except OSError as error:  # it has gone again, or there are no descriptors now: others come later
            if not self._failing:
                logger.warning("a connection could not be accepted: %s", error)
            self._failing = True
            time.sleep(0.01)
            return
        self._failing = False
        if len(self._pending) >= self._most:
            self._cut(min(self._pending.values(), default=0.0))
        with self._lock:
            self._pending[stream] = time.monotonic() + self._handshake_s
        where = f"{peer[0]}:{peer[1]}"
        try:
            self._workers.submit(self._shake_hands, stream, where)
        except RuntimeError as error:  # no thread can be started: what waits is for those that run
            with self._lock:
                self._pending.pop(stream, None)
                stream.close()
            self._refused(f"{where} was refused: {error}")

    def _cut(self, until: float) -> None:
        """End the handshakes that had time until then."""
        with self._lock:
            late = [stream for stream, deadline in self._pending.items() if deadline <= until]
            for stream in late:  # under the lock: its number is still its own
                del self._pending[stream]
                hang_up(stream)

    def _shake_hands(self, stream: socket.socket, peer: str) -> None:
        connection: SocketConnection | None = None
        heard, wrong = None, ""
        try:
            with self._lock:  # a stream is cut or closed, not both at a time
                connection = SocketConnection(stream)
            prove(connection, self._key, first=True)
            compare_protocols(connection)
            heard = () if self._hello is None else (require_record(connection.receive(), self._hello),)
        except (ElasticError, OSError, EOFError) as error:  # OSError: there are no descriptors left
            wrong = str(error) or "its connection ended"
        with self._lock:
            late = self._pending.pop(stream, None) is None
            if connection is not None and (late or heard is None):
                connection.close()
        if connection is None or late or heard is None:
            self._refused(f"{peer} was refused: {'it took too long' if late else wrong}")
            return
        try:
            self._accepted(connection, *heard)
        except Exception:  # the fleet's own fault: others may still come
            connection.close()
            logger.exception("%s could not be taken", peer)


def parse_address(text: str, *, option: str) -> tuple[str, int]:
    """Return the host and port of `HOST:PORT`, or of `PORT` alone for this machine. Raises `ConfigError`."""
    host, _, port = text.rpartition(":")
    if not re.fullmatch(r"\d{1,5}", port, re.ASCII) or not int(port) < 65536:
        raise ConfigError(f"{option} {text!r} is no address; give HOST:PORT, as {LOOPBACK}:4000")
    return host.strip("[]") or LOOPBACK, int(port)
