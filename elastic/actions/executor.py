"""The executor: the one thread that prepares, commits and finishes actions, and retries deferred ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from elastic.actions.agreement import Agreement
from elastic.actions.base import ActionHandler
from elastic.actions.results import followed_by
from elastic.errors import ConfigError, ElasticError
from elastic.hooks.forward_gate import ForwardGate
from elastic.types import Action, Change, Result

RETRY = "pages came free"
Prepared = list[tuple[ActionHandler, Any]]
"""Each action's handler, and what its `prepare` returned."""


@dataclass
class ActionTiming:
    """Milliseconds of the stages of one job."""

    prepare_ms: float = 0.0
    wait_ms: float = 0.0
    pause_ms: float = 0.0


@dataclass(frozen=True)
class ActionOutcome:
    """The end of one action, for the record."""

    action: Action
    why: str
    timing: ActionTiming
    result: Result | None
    error: str = ""


@dataclass(frozen=True)
class _Job:
    """Actions to be done together, all or none."""

    actions: tuple[Action, ...]
    why: str
    done: Future[tuple[Result, ...]] = field(default_factory=Future)


class ActionExecutor:
    """Runs jobs one after another, each of one or several actions, all or none."""

    def __init__(
        self,
        gate: ForwardGate,
        handlers: Mapping[type, ActionHandler],
        record: Callable[[ActionOutcome], object],
        agreement: Agreement,
    ) -> None:
        self._gate = gate
        self._agreement = agreement
        self._handlers = dict(handlers)
        self._record = record
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._retrying = False
        self._unfinished = 0
        self._counting = threading.Lock()
        self._thread = threading.Thread(target=self._run_jobs, name="elastic-runtime", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self, timeout_s: float | None = None) -> None:
        """Finish the jobs that were submitted, and end the thread."""
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def submit(self, actions: Sequence[Action], why: str) -> Future[tuple[Result, ...]]:
        """Have actions done; the future has their results in order."""
        job = _Job(tuple(actions), why)
        with self._counting:
            self._unfinished += 1
        self._jobs.put(job)
        return job.done

    @property
    def busy(self) -> bool:
        """Whether any job is not done yet, or any action deferred."""
        return self._unfinished > 0 or bool(self._deferred())

    def retry(self) -> None:
        """Have deferred actions tried again. May be called under any lock: it only queues a job."""
        if not self._retrying and self._deferred():
            self._retrying = True
            self.request((), RETRY)

    def request(self, actions: Sequence[Action], why: str) -> Future[tuple[Result, ...]] | None:
        """Have actions done that nobody waits for; None where all ranks are asked to begin them."""
        return None if self._agreement.propose(actions, why) else self.submit(actions, why)

    def handler(self, action: Action) -> ActionHandler:
        """Return the handler of an action. Raises `ConfigError` for what is no action of this model."""
        if type(action) not in self._handlers:
            kinds = ", ".join(kind.__name__ for kind in self._handlers)
            raise ConfigError(f"{action!r} is no action of this model; there are {kinds}")
        return self._handlers[type(action)]

    def _run_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            results: tuple[Result, ...] = ()
            fault: BaseException | None = None
            try:
                results = self._run(job)
            except BaseException as error:  # handed to whoever waits for the result
                fault = error
            with self._counting:
                self._unfinished -= 1
            if fault is None:
                job.done.set_result(results)
            else:
                job.done.set_exception(fault)
            del job, results, fault

    def _run(self, job: _Job) -> tuple[Result, ...]:
        """Run a job, then deferred actions for as long as pages that came free let one of them be done."""
        actions = job.actions
        if job.why == RETRY:
            self._retrying = False
            actions = self._deferred()
        results = latest = self._transact(actions, job.why)
        while any(isinstance(result, Change) and result.layers and result.deferred for result in latest):
            try:
                latest = self._transact(self._deferred(), RETRY)
            except (ElasticError, RuntimeError):  # recorded; the actions stay deferred
                break
            changes = [result for result in latest if isinstance(result, Change)]
            results = tuple(followed_by(r, changes) if isinstance(r, Change) else r for r in results)
        return results

    def _transact(self, actions: tuple[Action, ...], why: str) -> tuple[Result, ...]:
        """Prepare, commit and finish actions, and record them; if one fails, none is done."""
        timing = ActionTiming()
        try:
            prepared = self._prepare(actions, timing)
            self._agree(prepared)
            self._commit(prepared, timing)
            self._agreement.committed()
        except Exception as error:  # whatever it is: the record has it, and who asked gets it
            for action in actions:
                self._record(ActionOutcome(action, why, timing, None, str(error)))
            raise
        results = tuple(handler.finish(state) for handler, state in prepared)
        for action, result in zip(actions, results, strict=True):
            if why != RETRY or result.layers:
                self._record(ActionOutcome(action, why, timing, result))
        return results

    def _prepare(self, actions: Sequence[Action], timing: ActionTiming) -> Prepared:
        start = time.perf_counter()
        prepared: Prepared = []
        try:
            for action in actions:
                handler = self.handler(action)
                prepared.append((handler, handler.prepare(action)))
        except BaseException as error:
            self._agreement.refuse(error)
            with self._gate.exclusive():
                _roll_back(prepared)
            raise
        timing.prepare_ms = (time.perf_counter() - start) * 1e3
        return prepared

    def _agree(self, prepared: Prepared) -> None:
        """Keep of what was prepared what all ranks have, or roll back with them."""
        try:
            agreed = self._agreement.vote([handler.layers(state) for handler, state in prepared])
            for (handler, state), layers in zip(prepared, agreed, strict=True):
                handler.shorten(state, layers)
        except BaseException:
            with self._gate.exclusive():
                _roll_back(prepared)
            raise

    def _commit(self, prepared: Prepared, timing: ActionTiming) -> None:
        """Commit between two forward passes: the safe point (law 6)."""
        with self._gate.exclusive() as waited_s:
            timing.wait_ms = waited_s * 1e3
            start = time.perf_counter()
            try:
                for handler, state in prepared:
                    handler.commit(state)
            except BaseException:
                _roll_back(prepared)
                raise
            timing.pause_ms = (time.perf_counter() - start) * 1e3

    def _deferred(self) -> tuple[Action, ...]:
        return tuple(action for handler in dict.fromkeys(self._handlers.values()) for action in handler.deferred())


def _roll_back(prepared: Prepared) -> None:
    for handler, state in reversed(prepared):
        handler.rollback(state)
