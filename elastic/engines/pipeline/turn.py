"""Whose turn it is to compute on a rank that computes steps of several instances."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

from elastic.engines.pipeline.busy_window import BusyWindow
from elastic.errors import StateError

WEIGHT = 0.05
"""Of the last time in a mean of times."""


@dataclass(frozen=True)
class StageTimes:
    """What a rank did with its time since it began. It was idle for want of work in the rest of it."""

    busy_s: float = 0.0
    """Somebody computed."""
    bubble_s: float = 0.0
    """Nobody did, while steps were in flight here that all waited for other ranks, or sequences of other ranks were
    live here and waited for their next step."""
    waiting_s: float = 0.0
    """That steps waited for hidden states of other ranks, added up over steps: others may have computed meanwhile."""
    load: float = 0.0
    """The share of the last two minutes in which somebody computed."""


class Turn:
    """A lock that goes to whoever has waited longest: `with turn:`. A thread has it while it computes layers.

    No thread may wait for another rank while it has the turn: that rank may wait for this one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None  # a thread
        self._waiting: deque[tuple[int, threading.Lock]] = deque()  # threads, and what is released when it is theirs
        self._idle = threading.Condition(self._lock)
        self._began_s = 0.0
        self._awaiting = 0  # steps that have given it up
        self._expecting = 0  # threads that wait for a step
        self._busy_s = self._bubble_s = self._waiting_s = 0.0
        self._counted_s = time.perf_counter()  # until when these are counted
        self._window = BusyWindow(self._counted_s)
        self.stage_s = 0.0
        """For how long it is held at a time, in the mean of the last times."""

    @property
    def mine(self) -> bool:
        """Whether the present thread has it."""
        return self._holder == threading.get_ident()

    @property
    def times(self) -> StageTimes:
        """What was done until now."""
        with self._lock:
            self._count(time.perf_counter())
            load = self._window.share(self._counted_s)
            return StageTimes(self._busy_s, self._bubble_s, self._waiting_s, load)

    def __enter__(self) -> None:
        """Wait for the turn. Raises `StateError` in a thread that has it: it would wait for itself."""
        if self.mine:
            raise StateError("this thread has the turn to compute already")
        self._take()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pass_on()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nobody has it, or wants it; return whether that was in time."""
        with self._idle:
            return self._idle.wait_for(lambda: self._holder is None, timeout_s)

    @contextmanager
    def given_up(self) -> Iterator[None]:
        """Let others compute while this thread waits; it has the turn again behind it, whatever was raised."""
        if not self.mine:
            raise StateError("this thread does not have the turn to compute")
        self._pass_on(1)
        try:
            yield
        finally:
            self._take(-1)

    @contextmanager
    def step_expected(self) -> Iterator[None]:
        """Count it as a bubble that nobody computes meanwhile: this thread waits for the next step of another rank."""
        self._expect(1)
        try:
            yield
        finally:
            self._expect(-1)

    def _expect(self, steps: int) -> None:
        with self._lock:
            self._count(time.perf_counter())
            self._expecting += steps

    def _take(self, awaiting: int = 0) -> None:
        """Have the turn; the count of steps that have given it up changes before it is waited for."""
        with self._lock:
            now_s = time.perf_counter()
            self._count(now_s)
            self._awaiting += awaiting
            if self._holder is None:
                self._holder, self._began_s = threading.get_ident(), now_s
                return
            handed = threading.Lock()
            handed.acquire()
            place = threading.get_ident(), handed
            self._waiting.append(place)
        try:
            handed.acquire()
        except BaseException:  # an interrupt
            with self._lock:
                came = place not in self._waiting
                if not came:
                    self._waiting.remove(place)
            if came:
                self._pass_on()
            raise

    def _count(self, now_s: float) -> None:
        """Count the time since something changed last; under the lock."""
        past_s = now_s - self._counted_s
        if past_s <= 0:  # another thread took its time later, and has counted
            return
        self._counted_s = now_s
        if self._holder is not None:
            self._busy_s += past_s
            self._window.add(now_s - past_s, now_s)
        elif self._awaiting or self._expecting:
            self._bubble_s += past_s
        self._waiting_s += past_s * self._awaiting

    def _pass_on(self, awaiting: int = 0) -> None:
        now_s = time.perf_counter()
        with self._lock:
            self._count(now_s)
            self._awaiting += awaiting
            self.stage_s += (now_s - self._began_s - self.stage_s) * (WEIGHT if self.stage_s else 1.0)
            if self._waiting:
                self._holder, handed = self._waiting.popleft()
                self._began_s = now_s
                handed.release()
            else:
                self._holder = None
                self._idle.notify_all()
