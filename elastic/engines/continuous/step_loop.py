"""The loop of an engine: it has steps chosen and computed, and hands on what came of them. It knows no model."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import TypeVar

from elastic.clock import settle
from elastic.engines.base import FinishReason
from elastic.engines.continuous.active_requests import ActiveRequests
from elastic.engines.core.restart import RestartingScheduler
from elastic.engines.core.step import Executor, Step, StepResult
from elastic.errors import RankLost, StateError

logger = logging.getLogger(__name__)
T = TypeVar("T")
POLL_S = 0.1
"""How often it is looked whether sequences that wait for blocks can go on: nobody tells when a limit was raised."""
IDLE_S = 0.02
"""How long there is no sequence before idle time is used: whoever sends one request after another comes sooner."""


class StepLoop:
    """Runs on one thread; `post`, `between_steps` and `stop` may be called from any."""

    def __init__(self, scheduler: RestartingScheduler, executor: Executor, requests: ActiveRequests) -> None:
        self.scheduler = scheduler
        self.thread: threading.Thread | None = None
        """On which it runs; None: it was not started."""
        self.lost: RankLost | None = None
        """Why a step was lost on its way; no further one is begun while it stands here."""
        self.paused = False
        """Whether no step is begun, since somebody wishes so. For the loop's thread."""
        self.on_step: Callable[[], object] | None = None
        """While there is no journal: told after each step, and when sequences ended otherwise, if somebody listens."""
        self.on_room: Callable[[], object] | None = None
        """With a journal: told when blocks came free behind what was told of their sequences, and no step follows."""
        self.before_steps: Callable[[], object] = lambda: None
        """Called ahead of steps: it may `settle_all`."""
        self.when_idle: Callable[[], bool] = lambda: False
        """Called while no sequence is here, until it returns that it has nothing to do."""
        self.when_stuck: Callable[[], object] = lambda: None
        """Called while sequences are here and no step is possible: some may never be, since pages were taken."""
        self.followed_s = 0.0
        """For how long steps waited for what was said to follow."""
        self._follow_until_s = 0.0
        self._to_tell = False
        self._executor = executor
        self._requests = requests
        self._in_flight: deque[tuple[Step, Future[StepResult]]] = deque()
        self._commands: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()  # of the commands, and `ended`
        self.news = threading.Event()
        """Set by whoever wishes that it looks again whether a sequence can go on."""
        self._draining = self._halting = False
        self.ended = False
        """True when nothing is taken any more."""

    def start(self) -> None:
        """Run on a thread of its own."""
        self.thread = threading.Thread(target=self.run, name="elastic-engine", daemon=True)
        self.thread.start()

    def post(self, command: Callable[[], object]) -> None:
        """Have the loop's thread call something between two steps, in order. Raises `StateError` if it has ended."""
        with self._lock:
            if self.ended:
                raise StateError("the engine has stopped; make a new one")
            self._commands.append(command)
        self.news.set()

    def between_steps(self, work: Callable[[], T], *, follow_s: float = 0.0) -> T:
        """Have the loop's thread do something between two steps; return or raise what it does.

        No step begins for `follow_s` behind it, or until something else is to be done: what follows on what was
        returned comes before a step then.
        """
        if threading.current_thread() is self.thread:
            raise StateError("a listener cannot ask its engine to move a request; use another thread")
        self.require_started()
        done: Future[T] = Future()

        def do() -> None:
            settle(done, work)
            self._follow_until_s = time.perf_counter() + follow_s if follow_s else 0.0

        self.post(do)
        return done.result()

    def require_started(self) -> None:
        """Raise `StateError` before `start`."""
        if self.thread is None:
            raise StateError("the engine is not serving; start it first")

    def stop(self, *, drain: bool) -> None:
        """End when all sequences have (`drain`), or after the steps in flight; what is left is cancelled."""
        self._draining = True
        self._halting = self._halting or not drain
        self.news.set()

    def run(self) -> None:
        """Run until it is stopped. Whatever ends it, all sequences have ended then, and later commands are refused."""
        try:
            while not self._halting:
                self.news.clear()  # before looking: what comes later is seen the next time
                self._run_commands()
                self._tell(always=False)
                if self._halting or (self._draining and (self.lost is not None or not self.scheduler.has_work)):
                    break
                if self.advance():
                    continue
                if self.scheduler.has_work and not (self.lost or self.paused):
                    self.when_stuck()
                    self._tell(always=False)
                if not self.scheduler.has_work and (self.news.wait(IDLE_S) or self.when_idle()):
                    continue
                self.news.wait(POLL_S if self.scheduler.has_work else None)
            while self._in_flight:
                self._finish_step()
        finally:
            with self._lock:
                self.ended = True
            self._run_commands()
            with (
                ExitStack() as ends
            ):  # each is told, also where a fault of the engine itself keeps another from its end
                for held in self.scheduler.held.values():
                    ends.callback(self.scheduler.release, held)
                for name in reversed(self.scheduler.sequences):
                    ends.callback(self.end, name, "cancelled")
            self._tell(always=False)
            self._executor.remove(self.scheduler.take_removed())

    def advance(self) -> bool:
        """Begin what steps can be, and finish the oldest; return whether there was one."""
        self.before_steps()
        while self.lost is None and not self.paused and len(self._in_flight) < len(self.scheduler.cohorts):
            step = self.scheduler.schedule()
            if self.scheduler.stalled:
                self._requests.counters.stalled(self.scheduler.stalled)
            if step is None:
                break
            if step.added:
                self._requests.scheduled([self.scheduler.sequences[state.id] for state in step.added])
            self._in_flight.append((step, self._executor.execute(step)))
        if not self._in_flight:
            self._executor.remove(self.scheduler.take_removed())
            return False
        self._finish_step()
        return True

    def end(self, sequence: str, finish: FinishReason, error: str | None = None) -> None:
        """End a sequence; unknown: nothing happens. On the loop's thread."""
        ended = self.scheduler.cancel(sequence)
        if ended is not None:
            self._requests.end(ended, finish, error)
            self._to_tell = True

    def lose(self, error: RankLost) -> None:
        """Begin no further step; the first error counts. From any thread."""
        self.lost = self.lost or error

    def require_all_ranks(self) -> None:
        """Raise `RankLost` where a step was lost."""
        if self.lost is not None:
            raise RankLost(f"{self.lost}; the engine waits to recover", rank=self.lost.rank)

    def settle_all(self) -> None:
        """Finish all steps that are in flight. On the loop's thread."""
        while self._in_flight:
            self._finish_step()

    def settle_intact(self) -> None:
        """Finish all steps that are in flight. Raises `RankLost` if one was lost, or had been."""
        self.settle_all()
        self.require_all_ranks()

    def settle(self, sequences: Iterable[str]) -> None:
        """Finish steps until none of these sequences is in one. On the loop's thread."""
        live = [self.scheduler.sequences[name] for name in sequences if name in self.scheduler.sequences]
        while any(sequence.in_flight for sequence in live):
            self._finish_step()

    def _finish_step(self) -> None:
        step, future = self._in_flight.popleft()
        try:
            result = future.result()
        except RankLost as error:
            logger.warning("step %d was lost on its way: %s", step.number, error)
            self.scheduler.void(step)
            self.lose(error)
        except Exception as error:  # whatever the model raises ends its batch, and each sequence in it; others go on
            logger.exception("a forward pass of continuous batching failed; the requests in it end")
            for sequence in self.scheduler.fail(step):
                self._requests.end(sequence, "failed", str(error))
        else:
            self._requests.counters.stepped(sum(len(chunk.tokens) for chunk in step.chunks))
            self._requests.produced(self.scheduler.update(step, result))
        self._tell(always=True)

    def _tell(self, *, always: bool) -> None:
        if self.scheduler.journal is not None:
            freed = self.scheduler.journal.tell(always=always)
            if freed and not self.scheduler.has_work:
                _call(self.on_room)
        elif always or self._to_tell:
            _call(self.on_step)
        self._to_tell = False

    def _run_commands(self) -> None:
        """Run what was posted, and wait for what was said to follow."""
        while self._commands or self._follow_until_s:
            if self._commands:
                self._commands.popleft()()
                continue
            began_s = time.perf_counter()
            while not self._commands and (left_s := self._follow_until_s - time.perf_counter()) > 0:
                self.news.clear()
                if not self._commands:
                    self.news.wait(left_s)
            self._follow_until_s = 0.0
            self.followed_s += time.perf_counter() - began_s


def _call(listener: Callable[[], object] | None) -> None:
    """Tell a listener, if there is one."""
    if listener is None:
        return
    try:
        listener()
    except Exception:  # whoever hears it may be gone: its engine goes on
        logger.exception("the listener of an engine's steps failed")
