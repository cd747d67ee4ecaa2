"""One background thread for memory: it does tasks that may be submitted from anywhere, finalizers included."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from elastic.openmp import release_threads

logger = logging.getLogger(__name__)


class BackgroundThread:
    """Calls what is submitted to it, one by one; a task that waits already is not called twice.

    `submit` is safe inside a finalizer (SimpleQueue is reentrant); `start` is not, so whoever opens a place calls it.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._waiting: set[Callable[[], object]] = set()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._beside: list[threading.Thread] = []

    def start(self) -> None:
        """Start the daemon thread if it does not run."""
        with self._starting:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="elastic-janitor", daemon=True)
                self._thread.start()

    def submit(self, task: Callable[[], object]) -> None:
        """Have `task` called soon: each time that the thread wakes, a forward pass waits for the interpreter."""
        if task not in self._waiting:
            self._waiting.add(task)
            self._tasks.put(task)

    def run_beside(self, task: Callable[[], object]) -> None:
        """As a task of this thread, call one on a thread of its own, as it may wait for others than those behind it."""
        thread = threading.Thread(target=_call, args=(task,), name="elastic-janitor-beside", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the process can have no more threads: the tasks behind it wait
            task()
            return
        self._beside = [*filter(threading.Thread.is_alive, self._beside), thread]

    def finish(self, timeout_s: float = 10) -> None:
        """Do what was submitted, then stop: a thread that is in torch when the interpreter ends would abort it."""
        end_s = time.monotonic() + timeout_s
        thread = self._thread
        if thread is not None and thread.is_alive():
            self._tasks.put(None)
            thread.join(timeout_s)
        for thread in self._beside:
            thread.join(max(0.0, end_s - time.monotonic()))

    def _work(self) -> None:
        while True:
            task = self._tasks.get()
            if task is None:
                return
            self._waiting.discard(task)  # before the call: what is submitted from now on may be news to it
            _call(task)
            del task
            release_threads()


def _call(task: Callable[[], object]) -> None:
    try:
        task()
    except Exception:  # the thread must outlive any task; the fault is logged with its traceback
        logger.exception("a background task of Elastic failed")


janitor = BackgroundThread()
atexit.register(janitor.finish)
