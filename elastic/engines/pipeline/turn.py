"""Whose turn it is to compute on a rank that computes steps of several instances."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from elastic.errors import StateError


class Turn:
    """A lock that goes to whoever has waited longest: `with turn:`. A thread has it while it computes layers.

    No thread may wait for another rank while it has the turn: that rank may wait for this one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None  # a thread
        self._waiting: deque[tuple[int, threading.Lock]] = deque()  # threads, and what is released when it is theirs

    @property
    def mine(self) -> bool:
        """Whether the present thread has it."""
        return self._holder == threading.get_ident()

    def __enter__(self) -> None:
        """Wait for the turn. Raises `StateError` in a thread that has it: it would wait for itself."""
        if self.mine:
            raise StateError("this thread has the turn to compute already")
        self._take()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pass_on()

    @contextmanager
    def given_up(self) -> Iterator[None]:
        """Let others compute while this thread waits; it has the turn again behind it, whatever was raised."""
        if not self.mine:
            raise StateError("this thread does not have the turn to compute")
        self._pass_on()
        try:
            yield
        finally:
            self._take()

    def _take(self) -> None:
        with self._lock:
            if self._holder is None:
                self._holder = threading.get_ident()
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

    def _pass_on(self) -> None:
        with self._lock:
            self._holder = None
            if self._waiting:
                self._holder, handed = self._waiting.popleft()
                handed.release()
