"""The worker of a runtime: the one thread that prepares, commits and finishes actions, and retries deferred ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from elastic.actions.base import ActionHandler
from elastic.actions.results import followed_by
from elastic.errors import ConfigError, ElasticError
from elastic.hooks.forward_gate import ForwardGate
from elastic.types import Action, Change, Result

RETRY = "pages came free"


@dataclass
class ActionTiming:
    """Milliseconds of the stages of one job."""

    prepare_ms: float = 0.0
    wait_ms: float = 0.0
    pause_ms: float = 0.0


@dataclass(frozen=True)
class ActionOutcome:
    """What became of one action, for the record."""

    action: Action
    why: str
    timing: ActionTiming
    result: Result | None
    error: str = ""


class _QueuedAction:
    def __init__(self, actions: tuple[Action, ...], why: str) -> None:
        self.actions = actions
        self.why = why
        self.done: Future[tuple[Result, ...]] = Future()


class ActionExecutor:
    """Runs jobs one after another, each of one or several actions, all or none."""

    def __init__(
        self, gate: ForwardGate, mechanisms: Mapping[type, ActionHandler], record: Callable[[ActionOutcome], object]
    ) -> None:
        self._gate = gate
        self._mechanisms = dict(mechanisms)
        self._record = record
        self._jobs: SimpleQueue[_QueuedAction | None] = SimpleQueue()
        self._retrying = False
        self._under_way = 0
        self._counting = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="elastic-runtime", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float | None = None) -> None:
        """Finish what was put in, and end."""
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def put(self, actions: Sequence[Action], why: str) -> Future[tuple[Result, ...]]:
        """Have actions done; the future has their results in order."""
        return self._put(_QueuedAction(tuple(actions), why)).done

    @property
    def busy(self) -> bool:
        """Whether anything that was put in is not done yet, or was deferred."""
        return self._under_way > 0 or bool(self._pending())

    def retry(self) -> None:
        """Have deferred actions tried again. May be called under any lock: it only leaves a note."""
        if not self._retrying and self._pending():
            self._retrying = True
            self._put(_QueuedAction((), RETRY))

    def mechanism(self, action: Action) -> ActionHandler:
        """What does an action. Raises `ConfigError` for what is none."""
        if type(action) not in self._mechanisms:
            kinds = ", ".join(kind.__name__ for kind in self._mechanisms)
            raise ConfigError(f"{action!r} is no action of this model; there are {kinds}")
        return self._mechanisms[type(action)]

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                results = self._run(job.actions, job.why)
            except BaseException as error:  # handed to whoever waits for the result
                self._count(-1)
                job.done.set_exception(error)
            else:
                self._count(-1)
                job.done.set_result(results)
                del results
            del job

    def _put(self, job: _QueuedAction) -> _QueuedAction:
        self._count(1)
        self._jobs.put(job)
        return job

    def _count(self, jobs: int) -> None:
        with self._counting:
            self._under_way += jobs

    def _run(self, actions: tuple[Action, ...], why: str) -> tuple[Result, ...]:
        if why == RETRY:
            self._retrying = False
            actions = self._pending()
        results = done = self._once(actions, why)
        while any(isinstance(r, Change) and r.layers and r.deferred for r in done):
            try:  # what came free may do for those that wait
                done = self._once(self._pending(), RETRY)
            except (ElasticError, RuntimeError):  # recorded; they wait on
                break
            moved = [change for change in done if isinstance(change, Change)]
            results = tuple(followed_by(r, moved) if isinstance(r, Change) else r for r in results)
        return results

    def _once(self, actions: tuple[Action, ...], why: str) -> tuple[Result, ...]:
        timing = ActionTiming()
        try:
            prepared = self._prepare(actions, timing)
            self._commit(prepared, timing)
        except Exception as error:  # whatever it is: the record has it, and who asked gets it
            for action in actions:
                self._record(ActionOutcome(action, why, timing, None, str(error)))
            raise
        results = tuple(mechanism.finish(one) for mechanism, one in prepared)
        for action, result in zip(actions, results, strict=True):
            if why != RETRY or result.layers:
                self._record(ActionOutcome(action, why, timing, result))
        return results

    def _prepare(self, actions: Sequence[Action], timing: ActionTiming) -> list[tuple[ActionHandler, Any]]:
        start = time.perf_counter()
        prepared: list[tuple[ActionHandler, Any]] = []
        try:
            for action in actions:
                prepared.append((self.mechanism(action), self.mechanism(action).prepare(action)))
        except BaseException:
            with self._gate.exclusive():
                self._roll_back(prepared)
            raise
        timing.prepare_ms = (time.perf_counter() - start) * 1e3
        return prepared

    def _commit(self, prepared: Sequence[tuple[ActionHandler, Any]], timing: ActionTiming) -> None:
        with self._gate.exclusive() as waited_s:
            timing.wait_ms = waited_s * 1e3
            start = time.perf_counter()
            try:
                for mechanism, one in prepared:
                    mechanism.commit(one)
            except BaseException:
                self._roll_back(prepared)
                raise
            timing.pause_ms = (time.perf_counter() - start) * 1e3

    def _roll_back(self, prepared: Sequence[tuple[ActionHandler, Any]]) -> None:
        for mechanism, one in reversed(prepared):
            mechanism.rollback(one)

    def _pending(self) -> tuple[Action, ...]:
        return tuple(action for m in dict.fromkeys(self._mechanisms.values()) for action in m.deferred())
