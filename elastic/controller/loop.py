"""The controller: senses, asks its policy, and has the answer done. On a thread of its own, or by hand."""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from elastic.controller.decision import ControllerPolicy, Plan, checked, error_text
from elastic.controller.snapshot import Snapshot
from elastic.errors import StateError
from elastic.types import Action

logger = logging.getLogger(__name__)
FAULTS_KEPT = 20
TICK_S = 0.1
STOP_S = 10.0
"""For so long a tick that is under way is waited for."""
_controllers: weakref.WeakSet[Controller] = weakref.WeakSet()


@dataclass(frozen=True)
class ControllerFault:
    """An error in a tick, or in an action that it asked for. Only its text is kept."""

    when_s: float
    """Seconds since the epoch, of the last time."""
    text: str
    times: int = 1
    """In a row."""


@dataclass(frozen=True)
class ControllerHealth:
    """The condition of a controller."""

    running: bool = False
    """True while its thread is alive."""
    ticks: int = 0
    last_tick_s: float | None = None
    """Seconds since the epoch."""
    last_reason: str = ""
    last_figures: str = ""
    actions: int = 0
    """Plans with actions that were handed on."""
    faults: tuple[ControllerFault, ...] = ()
    """The last ones, oldest first; bounded."""
    cost: float = 0.0
    """The thread's CPU time as a share of the time since it was started."""
    in_tick_s: float | None = None
    """Seconds for which it has been in its present tick: many where a sensor or a policy hangs; None: between two."""


class Controller:
    """Senses, decides and acts at each tick. Thread-safe.

    `sense` gives a snapshot, or None when the instance is gone: then the thread ends. `act` is given the actions of a
    plan and its reason; it must not wait for them, and may return a future. Whatever sense, policy or act raise is kept
    as text, logged and shown by `health()`; the next tick comes, on the thread after `SystemExit` too. Controllers that
    share a `lock` tick one at a time.
    """

    def __init__(
        self,
        sense: Callable[[], Snapshot | None],
        policy: ControllerPolicy,
        act: Callable[[Sequence[Action], str], Any],
        *,
        tick_s: float = TICK_S,
        lock: threading.Lock | None = None,
    ) -> None:
        self.policy = policy
        self.tick_s = tick_s
        self._sense = sense
        self._act = act
        self._state: Any = None
        self._ticking = lock or threading.Lock()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._stop = threading.Event()
        self._pid = os.getpid()
        self._health = ControllerHealth()
        self._faults: deque[ControllerFault] = deque(maxlen=FAULTS_KEPT)
        self._futures: list[Future[Any]] = []
        """Of actions that were asked for, and may fail yet."""
        self._spent_s = 0.0
        self._began_s = math.nan
        self._tick_began_s: float | None = None

    def start(self) -> None:
        """Tick on a thread. Starting one that runs changes nothing; one that was stopped can be started again.

        Raises `StateError` in a process that was forked from the controller's.
        """
        self._require_own_process()
        with self._starting:
            if self._thread is not None and self._thread.is_alive() and not self._stop.is_set():
                return
            self._stop = threading.Event()
            self._spent_s, self._began_s = 0.0, time.perf_counter()
            self._thread = threading.Thread(
                target=_run, args=(weakref.ref(self), self._stop, self.tick_s), name="elastic-controller", daemon=True
            )
            _controllers.add(self)
            self._thread.start()

    def stop(self, timeout_s: float | None = STOP_S) -> None:
        """End the thread, after the tick that it is in. Can be called twice, also from within a tick.

        A tick that lasts longer than that (None: any time) hangs, and is left behind, which is logged: the thread ends
        with it, if it ends.
        """
        if os.getpid() != self._pid:
            return
        with self._starting:
            self._stop.set()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
            if thread.is_alive():
                _controllers.discard(self)  # the end of the process does not wait for it again
                seconds = self.health().in_tick_s or 0.0
                words = "the controller has been in its tick for %.0f s and is left behind; its sensors or %s hang"
                logger.warning(words, seconds, type(self.policy).__name__)

    def tick(self) -> Plan | None:
        """Sense, decide and act once; return the plan, or None after a fault or where the instance is gone.

        Raises `StateError` in a process that was forked from the controller's.
        """
        self._require_own_process()
        with self._ticking:
            start, self._tick_began_s = time.thread_time(), time.perf_counter()
            try:
                return self._tick()
            except Exception as error:  # the thread must outlive whatever policies, sensors and actions do
                self._note(error_text(error))
                return None
            finally:
                self._tick_began_s = None
                self._spent_s += time.thread_time() - start
                self._health = replace(self._health, ticks=self._health.ticks + 1, last_tick_s=time.time())

    def health(self) -> ControllerHealth:
        """Return its condition now."""
        thread, began_s = self._thread, self._tick_began_s
        in_tick_s = None if began_s is None else time.perf_counter() - began_s
        cost = self._spent_s / (time.perf_counter() - self._began_s) if thread else 0.0
        running = thread is not None and thread.is_alive() and os.getpid() == self._pid
        faults = tuple(self._faults)
        return replace(self._health, running=running, in_tick_s=in_tick_s, faults=faults, cost=cost)

    def _require_own_process(self) -> None:
        if os.getpid() != self._pid:
            raise StateError("this controller belongs to the process that forked; wrap the model again here")

    def _tick(self) -> Plan | None:
        for future in [each for each in self._futures if each.done()]:
            self._futures.remove(future)
            error = None if future.cancelled() else future.exception()
            if error is not None:
                self._note(error_text(error))
        snapshot = self._sense()
        if snapshot is None:
            self._stop.set()
            return None
        plan = checked(self.policy.decide(snapshot, self._state))
        self._state = plan.state
        if plan.fault:
            self._note(plan.fault)
        if plan.actions or plan.reason != self._health.last_reason:
            words = "; ".join(map(str, plan.actions)) or "nothing to do"
            with suppress(Exception):  # of a handler of logs: what is decided is done all the same
                logger.info("%s: %s (%s)", words, plan.reason, plan.figures)
        self._health = replace(
            self._health,
            last_reason=plan.reason,
            last_figures=plan.figures,
            actions=self._health.actions + bool(plan.actions),
        )
        if plan.actions:
            why = f"{plan.reason} ({plan.figures})" if plan.figures else plan.reason
            # what comes back is in no local: an error in it would know this frame
            self._futures.extend(each for each in [self._act(plan.actions, why)] if isinstance(each, Future))
        return plan

    def _note(self, text: str) -> None:
        """Keep a fault, or count it again: its text alone, for an error knows frames, and they know tensors."""
        last = self._faults[-1] if self._faults else None
        if last is not None and last.text == text:
            self._faults[-1] = ControllerFault(time.time(), text, last.times + 1)
            return
        self._faults.append(ControllerFault(time.time(), text))
        with suppress(Exception):
            logger.warning("a fault in the controller; it goes on: %s", text)


def _run(reference: weakref.ref[Controller], stop: threading.Event, tick_s: float) -> None:
    """Tick until stopped, on the controller's thread; between two ticks the controller may be collected."""
    wait_s = 0.0
    while not stop.wait(wait_s):
        controller = reference()
        if controller is None:
            return
        start = time.monotonic()
        try:
            controller.tick()
        except BaseException as error:  # such as `sys.exit()` in a policy
            controller._note(error_text(error))
        del controller
        wait_s = min(max(0.0, tick_s - (time.monotonic() - start)), threading.TIMEOUT_MAX)


@atexit.register
def _stop_all() -> None:
    """Stop all controllers at exit: a thread that is in torch when the interpreter ends would abort it."""
    for controller in list(_controllers):
        controller.stop()
