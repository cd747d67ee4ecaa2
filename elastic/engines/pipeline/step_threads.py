"""Threads that compute the steps of several cohorts at a time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
Work = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


@dataclass(eq=False)
class StepThreads:
    """Daemons, since one that waits for a rank which hangs must not keep the process from its end."""

    started: set[threading.Thread] = field(default_factory=set)
    _work: Work = field(default_factory=queue.SimpleQueue)

    def resize(self, count: int) -> None:
        """Have so many threads, all of them new. Nothing is being computed."""
        for _ in self.started:
            self._work.put(None)
        work: Work = queue.SimpleQueue()  # of their own, or a new thread might end in the place of an old one
        self._work = work
        self.started = {
            threading.Thread(target=self._run, args=(work,), name="elastic-cohort", daemon=True) for _ in range(count)
        }
        for thread in self.started:
            thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Have a thread call something."""
        done: Future[T] = Future()
        self._work.put((done, work))
        return done

    def _run(self, work: Work) -> None:
        while (item := work.get()) is not None:
            done, call = item
            try:
                done.set_result(call())
            except BaseException as error:  # it is whoever waits for it that it concerns
                done.set_exception(error)
