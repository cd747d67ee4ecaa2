"""Threads in simulated time, so that what waits for others runs as it is.

Each is a thread of the process, of which one runs at a time: until it waits, then the events go on. So what they do is
as deterministic as the events are.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from elastic import clock
from elastic.errors import StateError
from elastic.sim.core.clock import ScheduledEvent, VirtualClock

T = TypeVar("T")


class _SimulationOver(BaseException):
    """The simulation is over: a thread that waits ends."""


class SimulatedThread:
    """As `threading.Thread`; see `SimulatedThreads.thread`."""

    def __init__(self, threads: SimulatedThreads, work: Callable[[], object], name: str) -> None:
        self.name = name
        self.ident: int | None = None
        self._threads, self._work = threads, work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._alive = False
        self._error: BaseException | None = None
        self._joining: list[Waiter] = []

    def start(self) -> None:
        """Begin, as the next event."""
        self.ident, self._alive = id(self), True
        self._threads.started.append(self)
        self._threads.events.after(0.0, self._begin)

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        if self._alive:
            waiter = Waiter(self._threads)
            self._joining.append(waiter)
            waiter.wait(timeout)

    def is_alive(self) -> bool:
        """Return whether it has begun, and not ended."""
        return self._alive

    def resume(self) -> None:
        """Have it run until it waits or ends; raise what it raised."""
        before, self._threads.running = self._threads.running, self
        self._go.release()
        self._stopped.acquire()
        self._threads.running = before
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def pause(self) -> None:
        """Let the events go on until somebody resumes it. On itself."""
        if not self._threads.ended:
            self._stopped.release()
            self._go.acquire()
        if self._threads.ended:
            raise _SimulationOver

    def end(self) -> None:
        """Have it end where it waits, if it has begun."""
        if self._thread.ident is not None:
            self.resume()

    def _begin(self) -> None:
        if not self._threads.ended:
            self._thread.start()
            self.resume()

    def _run(self) -> None:
        self._go.acquire()
        try:
            with clock.use(self._threads):
                self._work()
        except _SimulationOver:
            pass
        except BaseException as error:  # the events' thread raises it
            self._error = error
        self._alive = False
        self._threads.started.remove(self)
        if not self._threads.ended:
            for waiter in self._joining:
                waiter.wake()
        self._stopped.release()


class Waiter:
    """One wait of the thread that makes it."""

    def __init__(self, threads: SimulatedThreads) -> None:
        self._threads = threads
        self._thread = threads.current_thread()
        self._timer: ScheduledEvent | None = None
        self._state = "new"

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until `wake`; return False if that takes longer than so many seconds."""
        if self._state == "woken":
            return True
        self._state = "waiting"
        if timeout is not None and timeout < math.inf:
            self._timer = self._threads.events.after(max(0.0, timeout), self._late)
        self._thread.pause()
        return self._state == "woken"

    def wake(self) -> None:
        """End the wait, as the next event; what was woken or was late before stays as it is."""
        before, self._state = self._state, "woken" if self._state != "late" else "late"
        if before == "waiting":
            if self._timer is not None:
                self._timer.cancel()
            self._threads.events.after(0.0, self._thread.resume)

    def _late(self) -> None:
        if self._state == "waiting":
            self._state = "late"
            self._thread.resume()


@dataclass(eq=False)
class SimulatedLock:
    """As `threading.Lock`; who waits for it gets it in order."""

    _threads: SimulatedThreads
    _locked: bool = False
    _waiting: deque[Waiter] = field(default_factory=deque)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it."""
        if self._locked:
            if not blocking:
                return False
            waiter = Waiter(self._threads)
            self._waiting.append(waiter)
            if not waiter.wait(None if timeout < 0 else timeout):
                self._waiting.remove(waiter)
                return False
        self._locked = True
        return True

    def release(self) -> None:
        """Give it to who waits first, or back."""
        if self._waiting:
            self._waiting.popleft().wake()  # it stays locked, for that one
        else:
            self._locked = False

    def locked(self) -> bool:
        """Return whether somebody has it."""
        return self._locked

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(eq=False)
class SimulatedCondition:
    """As `threading.Condition`."""

    _threads: SimulatedThreads
    _lock: clock.Lock
    _waiting: list[Waiter] = field(default_factory=list)

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """Wait, without the lock, until it is so; return what it is, or was when it was too late."""
        until_s = math.inf if timeout is None else self._threads.now() + timeout
        while not (outcome := predicate()) and self._threads.now() < until_s:
            waiter = Waiter(self._threads)
            self._waiting.append(waiter)
            self._lock.release()
            waiter.wait(until_s - self._threads.now())
            self._lock.acquire()
        return outcome

    def notify_all(self) -> None:
        """Have all look again."""
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            waiter.wake()


class SimulatedEvent(threading.Event):
    """An event that threads of a simulation wait for."""

    def __init__(self, threads: SimulatedThreads) -> None:
        self._threads, self._flag = threads, False  # which `is_set` of the base returns
        self._waiting: list[Waiter] = []

    def set(self) -> None:
        """Set it; whoever waits goes on."""
        self._flag = True
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            waiter.wake()

    def clear(self) -> None:
        """Have it be set no more."""
        self._flag = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set; return whether it is."""
        if not self._flag:
            waiter = Waiter(self._threads)
            self._waiting.append(waiter)
            if not waiter.wait(timeout) and waiter in self._waiting:
                self._waiting.remove(waiter)
        return self._flag


class SimulatedQueue:
    """As `queue.SimpleQueue`."""

    def __init__(self, threads: SimulatedThreads) -> None:
        self._items: deque[Any] = deque()
        self._some = SimulatedEvent(threads)

    def put(self, item: Any) -> None:
        """Append."""
        self._items.append(item)
        self._some.set()

    def get(self) -> Any:
        """Wait for the first, and take it."""
        while not self._items:
            self._some.clear()
            self._some.wait()
        return self._items.popleft()


class SimulatedFuture(Future[T]):
    """A future for whose result threads of a simulation can wait."""

    def __init__(self, threads: SimulatedThreads) -> None:
        super().__init__()
        self._threads = threads

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result. Raises `TimeoutError`, and what it was set to."""
        if not self.done():
            waiter = Waiter(self._threads)
            self.add_done_callback(lambda _: waiter.wake())
            if not waiter.wait(timeout):
                raise TimeoutError
        return super().result(0)


class SimulatedThreads(clock.Clock):
    """The threads of a simulation, and what they wait for."""

    def __init__(self, events: VirtualClock) -> None:
        self.events = events
        self.running: SimulatedThread | None = None
        self.started: list[SimulatedThread] = []
        """Those that have not ended."""
        self.ended = False
        self.now = self.wall = events
        self.sleep = lambda seconds: Waiter(self).wait(seconds)
        self.lock, self.condition = partial(SimulatedLock, self), partial(SimulatedCondition, self)
        self.event, self.queue = partial(SimulatedEvent, self), partial(SimulatedQueue, self)

    def thread(self, work: Callable[[], object], name: str) -> clock.Thread:
        """Return a thread. What it raises is raised by `run`."""
        return SimulatedThread(self, work, name)

    def current_thread(self) -> SimulatedThread:
        """Return the thread that runs. Raises `StateError` in an event: it cannot wait."""
        if self.running is None:
            raise StateError("an event of a simulation cannot wait; do it on a thread of the simulation")
        return self.running

    def run_together(self, calls: Sequence[Callable[[], T]], name: str) -> list[Future[T]]:
        """Do some things on a thread each; return when all are done."""
        futures: list[Future[T]] = [SimulatedFuture(self) for _ in calls]
        threads = [
            SimulatedThread(self, partial(clock.settle, future, call), f"{name}-{i}")
            for i, (call, future) in enumerate(zip(calls, futures, strict=True))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return futures

    def run(self, until: float = math.inf) -> None:
        """Have events happen until then, with this thread living by this clock, too."""
        with clock.use(self):
            self.events.run(until)

    def close(self) -> None:
        """End all threads. Can be called twice."""
        self.ended = True
        for thread in list(self.started):
            thread.end()
        self.started.clear()
