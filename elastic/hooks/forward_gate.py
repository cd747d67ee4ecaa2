"""The safe point: forward passes enter as readers, a commit is the one writer between them (law 6)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from elastic.errors import StateError


class ForwardActivity:
    """The forward passes of all models of this process. Thread-safe."""

    PAUSE_S = 0.05
    """Seconds after a forward pass in which the next one is expected: between the tokens of a generation."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active = 0
        self._ended_s = -self.PAUSE_S

    def begin(self) -> None:
        """Count a forward pass that begins."""
        with self._lock:
            self._active += 1

    def end(self) -> None:
        """Count a forward pass that ends, now."""
        with self._lock:
            self._active -= 1
            self._ended_s = time.monotonic()

    def busy(self) -> bool:
        """Return whether a model computes, or has just done so."""
        return self._active > 0 or time.monotonic() - self._ended_s < self.PAUSE_S


traffic = ForwardActivity()


class _EnteredModules(threading.local):
    """The modules (ids) whose forward passes a thread is in, outermost first."""

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.plain = False
        """In a pass whose layers all compute with weights of their own place, and do nothing else."""


class ForwardGate:
    """A reader-writer gate, re-entrant for readers of one thread.

    New forwards wait for a waiting commit; a commit waits for those that have begun, and after it the forwards that
    waited go before the next commit. So neither starves.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._readers = 0
        self._writing = False
        self._writers_waiting = 0
        self._readers_waiting = 0
        self._readers_first = 0  # readers to let in before the next writer
        self.thread = _EnteredModules()
        self.commits = 0
        """How many have ended."""
        self.before_commits: list[Callable[[], object]] = []
        """Called when no forward pass is left, before anything changes."""
        self.refusal: str | None = None
        """Set when nothing may pass any more (in a forked child): what the `StateError` says."""

    @property
    def inside(self) -> bool:
        """True inside a forward pass of this thread."""
        return bool(self.thread.keys)

    def enter(self, key: int) -> bool:
        """Begin a forward pass of the module `key`; returns whether it is the outermost of this thread.

        An entry with the same key that is still there was left by a forward that died without its hooks (Ctrl-C):
        it and what it contained are forgotten.
        """
        if self.refusal is not None:
            raise StateError(self.refusal)
        keys = self.thread.keys
        if key in keys:
            self.leave(key)
        keys.append(key)
        if len(keys) > 1:
            return False
        self._begin_reading()
        return True

    def leave(self, key: int) -> bool:
        """End the forward pass of `key`, and of what it contains; returns whether it was the outermost.

        A key that was not entered (a hook before ours raised) is ignored.
        """
        keys = self.thread.keys
        if key not in keys:
            return False
        del keys[keys.index(key) :]
        if keys:
            return False
        self.thread.plain = False
        self._end_reading()
        return True

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let commits pass while a forward pass of this thread waits for another process; it goes on behind them.

        So an action may come in the middle of the pass: the caller sees to it that none takes away what the pass
        needs. Outside a forward pass nothing happens.
        """
        if not self.inside:
            yield
            return
        self.thread.plain = False  # a commit may change that
        self._end_reading()
        try:
            yield
        finally:
            self._begin_reading()

    @contextmanager
    def exclusive(self) -> Iterator[float]:
        """Wait until no forward pass is left, keep new ones out, and call `before_commits`. Yields the seconds waited.

        Raises `StateError` inside a forward pass of this thread, which would wait for itself.
        """
        if self.inside:
            raise StateError("an action cannot be awaited inside a forward pass; call it with wait=False")
        start = time.perf_counter()
        with self._changed:
            self._writers_waiting += 1
            try:
                self._changed.wait_for(
                    lambda: not (self._readers or self._writing or (self._readers_first and self._readers_waiting))
                )
                self._writing = True
            finally:
                self._writers_waiting -= 1
                self._changed.notify_all()
        waited_s = time.perf_counter() - start
        try:
            for listener in tuple(self.before_commits):
                listener()
            yield waited_s
        finally:
            with self._changed:
                self._writing = False
                self.commits += 1
                self._readers_first = self._readers_waiting
                self._changed.notify_all()

    def _begin_reading(self) -> None:
        with self._changed:
            if self._writing or (self._writers_waiting and not self._readers_first):
                self._readers_waiting += 1
                self._changed.wait_for(
                    lambda: not self._writing and (self._readers_first > 0 or not self._writers_waiting)
                )
                self._readers_waiting -= 1
                self._readers_first = max(0, self._readers_first - 1)
            self._readers += 1
        traffic.begin()

    def _end_reading(self) -> None:
        with self._changed:
            self._readers -= 1
            self._changed.notify_all()
        traffic.end()
