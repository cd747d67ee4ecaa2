"""Ranks that come by themselves: started by torchrun, Slurm, Kubernetes, or by hand, on this host or another."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Self
from weakref import WeakMethod

from elastic.cluster.control.connection import SocketConnection
from elastic.cluster.control.handshake import read_key, require_key
from elastic.cluster.control.listener import LOOPBACK, Listener
from elastic.cluster.launch.base import START_S, await_hello
from elastic.cluster.rank.client import RankClient
from elastic.cluster.rank.spec import RankSpec
from elastic.errors import ConfigError, ElasticError, StateError, require, require_period
from elastic.memory.pages.finalizers import call_at_death

logger = logging.getLogger(__name__)
KEY_FILE = "ELASTIC_KEY_FILE"


class JoinLauncher:
    """Listens for ranks (`elastic rank --join HOST:PORT --key-file F`) that know the key, until `close`.

    A fleet closes it when it stops, `with` at the end of its block; where nobody keeps it, it closes by itself.

    `start` takes the next one that has come, whatever its spec says: a rank chooses its own model and places. One that
    comes while none is waited for waits for the next `start`, or goes where `pass_on` says.
    """

    name = "join"

    def __init__(
        self,
        key: bytes | str | Path | None = None,
        *,
        host: str = LOOPBACK,
        port: int = 0,
        start_timeout_s: float = START_S,
        refused: Callable[[str], None] | None = None,
    ) -> None:
        """`key` is the key itself, or the path of its file; None: that in the environment, as ELASTIC_KEY_FILE.

        Raises `ConfigError` for a bad file or address.
        """
        key = key if key is not None else os.environ.get(KEY_FILE)
        if key is None:
            raise ConfigError(f"ranks that join need a key: give JoinLauncher(key_file), or set {KEY_FILE}")
        require(isinstance(key, bytes | str | Path), "key", key, "the key itself, or the path of its file")
        require_period(start_timeout_s, "start_timeout_s")
        require(refused is None or callable(refused), "refused", refused, "a function of a text, or None")
        key = key if isinstance(key, bytes) else read_key(key)
        require_key(key, "key")
        self._start_timeout_s = start_timeout_s
        self._came = threading.Condition()  # of the five below
        self._on_joined: Callable[[RankClient], None] | None = None
        self._ready: deque[RankClient] = deque()
        self._loading: set[SocketConnection] = set()
        self._waiting = 0
        self._closed = False
        accept = WeakMethod(self._accept)  # else its thread would keep it alive
        self._listener = Listener((host, port), key, lambda connection: _accept(accept(), connection), refused=refused)
        call_at_death(self, self._listener.end)
        self.address = self._listener.address
        """Where ranks are to join."""

    def start(self, spec: RankSpec) -> RankClient:
        """Wait for the next rank; see `Launcher`."""
        with self._came:
            self._waiting += 1
            try:
                self._came.wait_for(lambda: self._has_ready() or self._closed, self._start_timeout_s)
                if self._ready:
                    return self._ready.popleft()
            finally:
                self._waiting -= 1
        why = "the launcher was closed" if self._closed else f"none has come within {self._start_timeout_s:.0f} s"
        where = f"{self.address[0]}:{self.address[1]}"
        raise StateError(f"rank {spec.name!r}: {why}; start it with: elastic rank MODEL --join {where} --key-file FILE")

    def pass_on(self, on_joined: Callable[[RankClient], None]) -> None:
        """Call a function with each rank that nobody waits for, from now on: on a thread of the launcher.

        With those that have come already it is called before this returns.
        """
        with self._came:
            self._on_joined = on_joined
            spare = [self._ready.popleft() for _ in range(len(self._ready) - self._waiting)]
        for client in spare:
            on_joined(client)

    def close(self) -> None:
        """Listen no more, and let ranks go that nobody has taken. Can be called twice."""
        with self._came:
            self._closed = True
            self._came.notify_all()
        self._listener.close()
        with self._came:
            loading = list(self._loading)
        for connection in loading:
            connection.close()
        while self._ready:
            self._ready.popleft().kill("the fleet was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _has_ready(self) -> bool:
        """Return whether a rank has come that is still there; let go of those before it that are not."""
        while self._ready and self._ready[0].gone:
            self._ready.popleft().kill("it has gone while nobody waited for it")
        return bool(self._ready)

    def _accept(self, connection: SocketConnection) -> None:
        thread = threading.Thread(target=self._introduce, args=(connection,), name="elastic-joining", daemon=True)
        with self._came:
            thread.start()  # where none can be had, the listener closes the connection
            self._loading.add(connection)

    def _introduce(self, connection: SocketConnection) -> None:
        """Wait until a rank has loaded its model, and give it to whoever wants it."""
        try:
            client = await_hello(connection, None, f"of {time.strftime('%H:%M:%S')}", timeout_s=self._start_timeout_s)
        except ElasticError as error:
            logger.warning("a rank that wanted to join could not start: %s", error)
            return
        finally:
            with self._came:
                self._loading.discard(connection)
        with self._came:
            closed, on_joined = self._closed, self._on_joined
            taken = not closed and (on_joined is None or self._waiting > len(self._ready))
            if taken:
                self._ready.append(client)
                self._came.notify()
        if closed:
            client.kill("the fleet was closed")
        elif not taken and on_joined is not None:
            on_joined(client)


def _accept(accept: Callable[[SocketConnection], None] | None, connection: SocketConnection) -> None:
    """Give a connection to a launcher's method; close it where the launcher is no more."""
    if accept is None:
        connection.close()
    else:
        accept(connection)
