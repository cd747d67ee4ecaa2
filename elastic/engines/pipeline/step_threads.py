"""Threads that compute the steps of several cohorts at a time."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from elastic.clock import settle

logger = logging.getLogger(__name__)
T = TypeVar("T")
Work = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


@dataclass(eq=False)
class StepThreads:
    """Daemons, since one that waits for a rank which hangs must not keep the process from its end."""

    started: set[threading.Thread] = field(default_factory=set)
    _work: Work = field(default_factory=queue.SimpleQueue)

    def resize(self, count: int) -> None:
        """Have so many threads, all of them new, or as many as can be had. Nothing is being computed."""
        for _ in self.started:
            self._work.put(None)
        work: Work = queue.SimpleQueue()  # of their own, or a new thread might end in the place of an old one
        self._work = work
        self.started = set()
        try:
            for _ in range(count):
                thread = threading.Thread(target=self._run, args=(work,), name="elastic-cohort", daemon=True)
                thread.start()
                self.started.add(thread)
        except RuntimeError as error:
            logger.warning("%d of %d steps can be computed at a time: %s", len(self.started), count, error)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Have a thread call something; without any it is the caller that does."""
        done: Future[T] = Future()
        if self.started:
            self._work.put((done, work))
        else:
            settle(done, work)
        return done

    def _run(self, work: Work) -> None:
        while (item := work.get()) is not None:
            done, call = item
            try:
                done.set_result(call())
            except BaseException as error:  # it is whoever waits for it that it concerns
                done.set_exception(error)
