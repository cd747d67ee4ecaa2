"""A rank as the fleet sees it: messages go out, news come in, questions are answered, and its end is told once."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from elastic.cluster.control.connection import Connection, SocketConnection, encode
from elastic.cluster.control.messages import Answer, Ask, Beat, Bye, Hello, News, Question, Refused, ToRank
from elastic.cluster.control.processes import RankProcess
from elastic.errors import StateError

logger = logging.getLogger(__name__)
Told = News | Refused | Beat
REASON_S = 1.0
"""How long it is waited for the reason of an end that the connection told first."""


class RankClient:
    """One rank, in the fleet's process. Made by launchers, when the rank has said who it is.

    `listen` begins to read; before it nothing is told, and questions wait. Thread-safe.
    """

    def __init__(self, connection: Connection, hello: Hello, process: RankProcess | None = None) -> None:
        self.hello = hello
        self._connection = connection
        self._process = process
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers: dict[int, Future[Any]] = {}
        self._ids = itertools.count()
        self._lock = threading.Lock()  # of the three below
        self._why: str | None = None
        self._told = False
        self._threads: list[threading.Thread] = []
        self._on_message: Callable[[Told], None] = lambda _: None
        self._on_lost: Callable[[str], None] = lambda _: None

    @property
    def lost(self) -> bool:
        """Whether the rank has gone, or was ended here."""
        return self._why is not None

    def listen(self, on_message: Callable[[Told], None], on_lost: Callable[[str], None]) -> None:
        """Begin: call `on_message` with what the rank tells, in order, on one thread, and `on_lost` once, at its end.

        All that the rank had sent is told before `on_lost`, which also follows `kill` and `close`, on the same thread;
        it gets the reason in words. Questions without an answer have failed by then.
        """
        self._on_message, self._on_lost = on_message, on_lost
        with self._lock:
            if self._threads:
                raise StateError(f"rank {self.hello.name!r} is listened to already")
            for work in (self._read, self._write):
                self._threads.append(
                    threading.Thread(target=work, name=f"elastic-{self.hello.name}-{work.__name__}", daemon=True)
                )
        for thread in self._threads:
            thread.start()

    def send(self, message: ToRank) -> None:
        """Have a message sent; never waits. After the rank's end it goes nowhere, as one that was under way would.

        Raises `ConfigError` for what cannot be pickled.
        """
        self._outbox.put(encode(message) if isinstance(self._connection, SocketConnection) else message)

    def ask(self, question: Question) -> Future[Any]:
        """Send a question; the future has the answer, or raises what the rank raised, or `StateError` at its end."""
        number, answer = next(self._ids), Future[Any]()
        answer.set_running_or_notify_cancel()
        with self._lock:
            why = self._why
            if why is None:
                self._answers[number] = answer
        if why is not None:
            answer.set_exception(StateError(f"rank {self.hello.name!r} has gone: {why}"))
            return answer
        self.send(Ask(number, question))
        return answer

    def kill(self, why: str = "killed by the fleet") -> None:
        """End the rank's process at once where we started it, and take no further word of it."""
        self._end(why)
        if self._process is not None:
            self._process.kill()
        self._connection.close()

    def close(self, *, drain: bool = False, timeout_s: float = 5.0) -> None:
        """Have the rank end in order, with `drain` after what it was given; kill it if it has not after `timeout_s`."""
        raise NotImplementedError

    # -- inside

    def _end(self, why: str) -> str:
        """Note the end; return its first reason."""
        with self._lock:
            self._why = self._why or why
            return self._why

    def _read(self) -> None:
        raise NotImplementedError

    def _write(self) -> None:
        raise NotImplementedError
