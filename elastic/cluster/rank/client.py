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

from elastic.cluster.control.connection import Connection, SocketConnection, encode, has_hung_up
from elastic.cluster.control.messages import Answer, Ask, Beat, Bye, Hello, News, Question, Refused, ToRank
from elastic.cluster.control.processes import RankProcess
from elastic.errors import StateError

logger = logging.getLogger(__name__)
Told = News | Refused | Beat
EXIT_S, LEAVE_S, REASON_S = 0.2, 2.0, 1.0
"""How long a process may live on when its connection has ended, also in order, and be waited for once it was killed."""


class RankClient:
    """One rank, in the fleet's process. Made by launchers, when the rank has said who it is.

    `listen` begins to read; before it nothing is told, and questions wait. Thread-safe.
    """

    def __init__(self, connection: Connection, hello: Hello, process: RankProcess | None = None) -> None:
        self.hello = hello
        self.heard_all = False
        """In `on_lost`: whether the process was killed, by whomever, and all that it had sent was told before."""
        self._connection = connection
        self._process = process
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answers: dict[int, Future[Any]] = {}
        self._ids = itertools.count()
        self._lock = threading.Lock()  # of the answers and the reason
        self.lost = ""
        """Why the rank has gone, or was ended here; "": it is there."""
        self._leaving = self._taking = False
        self._threads: list[threading.Thread] = []
        self._on_message: Callable[[Told], None] = lambda _: None
        self._on_lost: Callable[[str], None] = lambda _: None

    @property
    def behind(self) -> bool:
        """Whether it has told something that was not taken here yet: then its silence is not the rank's."""
        return self._taking or self._connection.pending

    @property
    def gone(self) -> bool:
        """Whether the rank has hung up, also while nobody listens, or not all that it had told was taken here."""
        return isinstance(self._connection, SocketConnection) and has_hung_up(self._connection.pipe)

    def listen(self, on_message: Callable[[Told], None], on_lost: Callable[[str], None]) -> None:
        """Begin: call `on_message` with what the rank tells, in order, on one thread, and `on_lost` once, at its end.

        All that the rank had sent is told before `on_lost`, which also follows `kill` and `close`, on the same thread;
        it gets the reason in words. Questions without an answer have failed by then.
        Raises `StateError` for one that is listened to, and where no thread can be had.
        """
        with self._lock:
            if self._threads:
                raise StateError(f"rank {self.hello.name!r} is listened to already")
            self._on_message, self._on_lost = on_message, on_lost
            self._threads = [
                threading.Thread(target=work, name=f"elastic-{self.hello.name}-{work.__name__}", daemon=True)
                for work in (self._read, self._write)
            ]
            try:
                for thread in reversed(self._threads):  # under the lock: who finds them there may join them
                    thread.start()
            except RuntimeError as error:
                self._threads = []
                self._outbox.put(None)  # for the one that has begun
                raise StateError(f"rank {self.hello.name!r} cannot be listened to now: {error}") from error

    def send(self, message: ToRank) -> None:
        """Have a message sent; never waits. After the rank's end it goes nowhere, as one that was under way would.

        Raises `ConfigError` for what cannot be pickled.
        """
        self._outbox.put(encode(message))

    def ask(self, question: Question) -> Future[Any]:
        """Send a question; the future has the answer, or raises what the rank raised, or `StateError` at its end."""
        number, answer = next(self._ids), Future[Any]()
        answer.set_running_or_notify_cancel()
        encoded = encode(Ask(number, question))
        with self._lock:
            lost = self.lost
            if not lost:
                self._answers[number] = answer
        if lost:
            answer.set_exception(self._gone())
        else:
            self._outbox.put(encoded)
        return answer

    def kill(self, why: str = "killed by the fleet") -> None:
        """End the rank's process at once where we started it; what it had sent is told before its end is.

        A rank that we did not start is not heard any more, and ends when it sees that.
        """
        self._end(why)
        if self._process is not None:
            self._process.kill()
        if self._process is None or self._process.ended is None or not self._threads:
            self._connection.close()
        if not self._threads and self._process is not None:
            self._process.wait(REASON_S)
            self._process.close()

    def refuse(self, why: str) -> None:
        """End a rank that nobody has listened to, and tell it why."""
        with suppress(StateError):  # it has gone
            self._connection.send(Bye(why=why))
        self.kill(why)
        self.close()

    def leave(self, *, drain: bool = False) -> None:
        """Ask the rank to end, with `drain` after what it was given, and do not wait for it; `close` does."""
        self._leaving = True
        self._outbox.put(encode(Bye(drain)))

    def close(self, *, drain: bool = False, timeout_s: float = 5.0) -> None:
        """Have the rank end in order, with `drain` after what it was given; kill it if it has not after `timeout_s`.

        Not from `on_message` or `on_lost`.
        """
        with suppress(StateError):  # somebody listens
            self.listen(lambda _: None, lambda _: None)
        self.leave(drain=drain)
        if not self._threads:  # nor can anybody: there are no threads left
            self.kill("killed by the fleet: nobody can listen to it")
            return
        self._threads[0].join(timeout_s)
        if self._threads[0].is_alive():
            self.kill(f"killed by the fleet: it had not ended {timeout_s:.0f} s after it was asked to")
        self._threads[0].join()

    # -- inside

    def _gone(self) -> StateError:
        return StateError(f"rank {self.hello.name!r} has gone: {self.lost}")

    def _end(self, why: str) -> None:
        """Note the end, unless there was an earlier one."""
        with self._lock:
            self.lost = self.lost or why

    def _write(self) -> None:
        with suppress(StateError):  # it has gone; the reader tells
            while (encoded := self._outbox.get()) is not None:
                self._connection.send_bytes(encoded)

    def _read(self) -> None:
        why, to_the_end = "its connection ended", False
        try:
            while self._has_more():
                message = self._connection.receive()
                self._taking = True
                self._take(message)
                self._taking = False
            to_the_end = True
        except EOFError:
            to_the_end = True
        except StateError as error:  # what came is no message: nothing after it can be trusted
            why = str(error)
        except Exception as error:  # nor after one that is not whole, or finds no memory
            why = f"it sent what could not be taken: {type(error).__name__}: {error}"
        self._finish(why, to_the_end)

    def _has_more(self) -> bool:
        """Wait for a message or the end of the connection; False when the process has ended, and all is read."""
        ended = None if self._process is None else self._process.ended
        return ended is None or not isinstance(self._connection, SocketConnection) or self._connection.wait(ended)

    def _take(self, message: Any) -> None:
        if isinstance(message, Answer):
            with self._lock:
                answer = self._answers.pop(message.id, None)
            if answer is None:
                raise StateError(f"it answered {message.id}, which was not asked")
            if message.error is not None:
                answer.set_exception(message.error)
            else:
                answer.set_result(message.value)
        elif isinstance(message, Bye):
            self._leaving = True
        elif isinstance(message, News | Refused | Beat):
            try:
                self._on_message(message)
            except Exception:  # the fleet's own fault is not the rank's: what it tells next is still true
                logger.exception("the fleet failed at a message of rank %s", self.hello.name)
        else:
            raise StateError(f"it sent a {type(message).__name__}, which no rank sends")

    def _finish(self, why: str, to_the_end: bool) -> None:
        """Fence the rank, fail what waits for it, and tell."""
        if self._process is not None:
            ended = self._process.wait(LEAVE_S if self._leaving else EXIT_S)
            self._process.kill()
            self.heard_all = to_the_end and not self._leaving and ended is not None and ended.by_signal
            ended = ended or self._process.wait(REASON_S)
            why = f"{ended.reason}; {why}" if ended else why
            self._process.close()
        self._end(why)
        self._outbox.put(None)
        self._connection.close()
        with self._lock:
            waiting, self._answers = list(self._answers.values()), {}
        for answer in waiting:
            answer.set_exception(self._gone())
        try:
            self._on_lost(self.lost)
        except Exception:  # as above: the fleet's own fault
            logger.exception("the fleet failed at the end of rank %s", self.hello.name)
