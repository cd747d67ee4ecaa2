"""How an engine ends: it is stopped, its process ends, or nobody has it any more."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from contextlib import ExitStack
from functools import partial

from elastic.engines.continuous.active_requests import ActiveRequests
from elastic.engines.continuous.step_loop import StepLoop
from elastic.engines.pipeline.home import HomeExecutor
from elastic.memory.pages.background import janitor
from elastic.memory.pages.finalizers import call_at_death, cancel
from elastic.runtime.runtime import Runtime

logger = logging.getLogger(__name__)
_lifetimes: weakref.WeakSet[EngineLifetime] = weakref.WeakSet()


class EngineLifetime:
    """The thread of an engine, and what it took of its model, until both are given back.

    An engine that is dropped ends with the last of its requests: none of its parts refers to it.
    """

    def __init__(self, runtime: Runtime, loop: StepLoop, home: HomeExecutor, requests: ActiveRequests) -> None:
        self._runtime, self._loop, self._home, self._requests = runtime, loop, home, requests
        self._lock, self._taken = threading.Lock(), ExitStack()
        self._engine: weakref.ref[object] | None = None

    def begin(self, engine: object, taken: ExitStack) -> None:
        """Have the engine end with its last reference, or the process. `taken` undoes what it did to its model."""
        self._taken = taken
        self._engine = call_at_death(engine, janitor.submit, partial(janitor.run_beside, self.end))
        _lifetimes.add(self)

    def end(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """Finish its requests (`drain`, for `timeout_s` at the most), or cancel them. Can be called twice.

        In a fork of its process nothing is done: the engine is the parent's.
        """
        if self._runtime.in_forked_child:
            return
        thread = self._loop.thread
        if thread is not None:
            self._stop_steps(drain)
            thread.join(timeout_s)
            if thread.is_alive():
                self._stop_steps(drain=False)
                thread.join()
        with self._lock:  # also by a later call, if this one is interrupted before
            self._taken.close()
        if self._engine is not None:
            cancel(self._engine)

    def end_dropped(self) -> bool:
        """End an engine that nobody has any more and that has no requests; return whether it was one.

        Its own thread, in the last listener, cannot.
        """
        in_use = self._engine is None or self._engine() is not None or self._requests.active
        if in_use or threading.current_thread() is self._loop.thread:
            return False
        self.end()
        return True

    def _stop_steps(self, drain: bool) -> None:
        self._loop.stop(drain=drain)
        if not drain:
            self._home.abort()


def _stop_all() -> None:
    """End all engines at exit: a thread that is in torch when the interpreter ends would abort it."""
    for lifetime in list(_lifetimes):
        try:
            lifetime.end(drain=False, timeout_s=10)
        except Exception:  # the process ends, and the other engines with it
            logger.exception("an engine could not be ended with its process")


atexit.register(_stop_all)
