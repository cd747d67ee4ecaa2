"""Time and threads: of this process, or of a simulation, for threads that run in one.

Whatever waits, wakes others or looks at the time by the clock of its thread can be simulated as it is: `use` has a
thread, and all that it starts, live by another `Clock`. Threads that nobody told otherwise have the process's own.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
INTERRUPT_S = 1.0
"""Until an interrupt is seen that came between two instructions, just as a wait began."""


class Lock(AbstractContextManager[bool], Protocol):
    """As `threading.Lock`."""

    def acquire(self, blocking: bool = ..., timeout: float = ...) -> bool: ...
    def release(self) -> None: ...
    def locked(self) -> bool: ...


class Condition(Protocol):
    """As `threading.Condition`."""

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = ...) -> Any: ...
    def notify_all(self) -> None: ...


class Thread(Protocol):
    """As a daemon `threading.Thread`."""

    name: str

    @property
    def ident(self) -> int | None: ...
    def start(self) -> None: ...
    def join(self, timeout: float | None = ...) -> None: ...
    def is_alive(self) -> bool: ...


class Queue(Protocol):
    """As `queue.SimpleQueue`."""

    def put(self, item: Any) -> None: ...
    def get(self) -> Any: ...


class Clock:
    """The time and the threads of this process; what simulates them derives from it, and has its own of each."""

    now: Callable[[], float] = staticmethod(time.perf_counter)
    """Returns seconds, of which differences count."""
    wall: Callable[[], float] = staticmethod(time.time)
    """Returns the time of day."""
    sleep: Callable[[float], object] = staticmethod(time.sleep)
    lock: Callable[[], Lock] = staticmethod(threading.Lock)
    condition: Callable[[Any], Condition] = staticmethod(threading.Condition)
    """Makes one of a lock."""
    event: Callable[[], threading.Event] = staticmethod(threading.Event)
    queue: Callable[[], Queue] = staticmethod(queue.SimpleQueue)
    """Makes one without a limit."""
    current_thread: Callable[[], Thread] = staticmethod(threading.current_thread)

    def thread(self, work: Callable[[], object], name: str) -> Thread:
        """Make a thread that was not started, and holds up nobody's end."""
        return threading.Thread(target=work, name=name, daemon=True)

    def run_together(self, calls: Sequence[Callable[[], T]], name: str) -> list[Future[T]]:
        """Do some things on a thread each; return, when all are done, what came of them, in order.

        They go on, and nobody waits for them, where the wait is interrupted.
        """
        threads, done = ThreadPoolExecutor(len(calls), name), False
        try:
            asked = [threads.submit(call) for call in calls]
            while wait(asked, INTERRUPT_S).not_done:
                pass
            done = True
            return asked
        finally:
            threads.shutdown(wait=done)


class _Here(threading.local):
    clock = Clock()


_here = _Here()


@contextmanager
def use(clock: Clock) -> Iterator[None]:
    """Have this thread live by a clock, until the end of the block."""
    before, _here.clock = _here.clock, clock
    try:
        yield
    finally:
        _here.clock = before


def current() -> Clock:
    """Return the clock that this thread lives by."""
    return _here.clock


def now() -> float:
    """Return seconds, of which differences count: those of `time.perf_counter`."""
    return _here.clock.now()


def sleep(seconds: float) -> None:
    """Wait."""
    _here.clock.sleep(seconds)


def submit(thread: Executor, work: Callable[..., T], *args: Any) -> Future[T]:
    """Have a thread do work; it is done here where the thread takes none any more, as the interpreter ends.

    Raises `RuntimeError` then in a daemon thread, which must not be in torch when the interpreter has ended.
    """
    try:
        return thread.submit(work, *args)
    except RuntimeError:
        if threading.current_thread().daemon:
            raise
        done: Future[T] = Future()
        settle(done, lambda: work(*args))
        return done


def settle(future: Future[T], call: Callable[[], T]) -> None:
    """Have a future be what a call returns, or raises: it goes to whoever asks for the result."""
    try:
        future.set_result(call())
    except Exception as error:  # whatever it is, who asks for the result hears it
        future.set_exception(error)
