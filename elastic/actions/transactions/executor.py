"""The executor: the one thread that prepares, commits and finishes actions, and retries deferred ones."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from elastic.actions.base import ActionHandler
from elastic.actions.results import followed_by
from elastic.actions.transactions.held import HeldTransactions
from elastic.actions.transactions.transaction import RETRY, ActionOutcome, Agreement, Transaction, TransactionRunner
from elastic.errors import ElasticError, StateError
from elastic.hooks.forward_gate import ForwardGate
from elastic.openmp import release_threads
from elastic.types import Action, Change, Result

logger = logging.getLogger(__name__)
T = TypeVar("T")


class _Thread(threading.local):
    told: set[ActionExecutor] | None = None
    """Who was told of pages since it began to try deferred actions again; None: it does not."""


class _Tries:
    """Tries of deferred actions, of all models of this process: one at a time.

    So none fails for pages that another one holds only until it has failed, too.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ended = 0


_thread, _tries = _Thread(), _Tries()
os.register_at_fork(after_in_child=_tries.__init__)  # type: ignore[misc]


@dataclass(frozen=True)
class _Job:
    """Something for the thread to do."""

    work: Callable[[], Any]
    done: Future[Any] = field(default_factory=Future)


class ActionExecutor:
    """Runs jobs one after another, each of one or several actions, all or none."""

    def __init__(
        self,
        gate: ForwardGate,
        handlers: Mapping[type, ActionHandler],
        record: Callable[[ActionOutcome], object],
        agreement: Agreement,
    ) -> None:
        self._agreement = agreement
        self.runner = TransactionRunner(gate, handlers, record, agreement)
        self.held = HeldTransactions(self.runner)
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._retrying = False
        self._came_free = False  # pages, since the present job began
        self.unfinished = 0
        """Jobs that are not done yet."""
        self.listeners: list[Callable[[], object]] = []
        """Called on the thread when a job is not among them any more, before whoever waits for it goes on."""
        self._closed = False
        self._counting = threading.Lock()
        self.thread = threading.Thread(target=self._run_jobs, name="elastic-runtime", daemon=True)
        """Started by whoever makes this."""

    def close(self, timeout_s: float | None = None) -> None:
        """Finish the jobs that were submitted, roll back what is held, and end the thread, if it runs."""
        with self._counting:
            self._closed = True
            self._jobs.put(None)
        if self.thread.is_alive():
            self.thread.join(timeout_s)

    def drain(self) -> None:
        """Wait for the jobs that were submitted, unless no more are taken."""
        with suppress(StateError):
            self.call(lambda: None).result()

    def submit(self, actions: Sequence[Action], why: str) -> Future[tuple[Result, ...]]:
        """Have actions done; the future has their results in order."""
        return self.call(partial(self._run, tuple(actions), why))

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Have something done while no action is under way; the future has its result."""
        job = _Job(work)
        with self._counting:  # and so before the end of jobs, or not at all
            if self._closed:
                raise StateError("the model was unwrapped; wrap it again")
            self.unfinished += 1
            self._jobs.put(job)
        return job.done

    def end_held(self, end: Callable[[], T]) -> Future[T]:
        """Have a held transaction ended, by a call of `held`; what waits for pages may have waited for that."""

        def work() -> T:
            try:
                return end()
            finally:
                self.retry()

        return self.call(work)

    def retry(self) -> None:
        """Have deferred actions tried again. May be called under any lock: it only queues a job.

        On a thread that tries some, not before it has switched something: what it gives back in vain was free before.
        """
        if _thread.told is not None:
            _thread.told.add(self)
            return
        self._came_free = True
        if not self._retrying and self.runner.deferred():
            self._retrying = True
            with suppress(StateError):  # unwrapped meanwhile
                self.request((), RETRY)

    def request(self, actions: Sequence[Action], why: str) -> Future[tuple[Result, ...]] | None:
        """Have actions done that nobody waits for; None where all ranks are asked to begin them."""
        return None if self._agreement.propose(actions, why) else self.submit(actions, why)

    def _run_jobs(self) -> None:
        while (job := self._next()) is not None:
            self._do(job)
            del job
        self.held.close()

    def _next(self) -> _Job | None:
        """Wait for a job, and roll back what has passed its deadline; None: there are no more."""
        while True:
            try:
                job = self._jobs.get(timeout=self.held.seconds_left())
            except Empty:
                job = None
            else:
                if job is None:
                    return None
            if self.held.expire():
                self.retry()
            if job is not None:
                return job

    def _do(self, job: _Job) -> None:
        """Do a job, unless it was cancelled; whoever waits for it gets its result, or its error."""
        result: Any = None
        fault: BaseException | None = None
        wanted = job.done.set_running_or_notify_cancel()
        try:
            result = job.work() if wanted else None
        except BaseException as error:  # handed to whoever waits for the result
            fault = error
        release_threads()
        with self._counting:
            self.unfinished -= 1
        for listener in tuple(self.listeners):
            try:
                listener()
            except Exception:  # whoever waits for the job gets what came of it
                logger.exception("who listens to actions failed")
        if fault is not None:
            job.done.set_exception(fault)
        elif wanted:
            job.done.set_result(result)
        del job, result, fault

    def _run(self, actions: tuple[Action, ...], why: str) -> tuple[Result, ...]:
        """Do actions, then deferred ones for as long as pages that came free let one of them be done."""
        if why == RETRY:
            return self._try_deferred()
        self._came_free, tries = False, _tries.ended
        results = self._followed(self._transact(actions, why))
        if self._came_free or _tries.lock.locked() or _tries.ended > tries:  # before these were known to wait, perhaps
            self.retry()
        return results

    def _try_deferred(self) -> tuple[Result, ...]:
        """Do deferred actions; if any layer switches, have others who were told of pages try theirs."""
        self._retrying, results = False, tuple[Result, ...]()
        with nullcontext() if self._agreement.several else _tries.lock:  # ranks wait for one another
            _thread.told = told = set[ActionExecutor]()
            try:
                results = self._followed(self._transact(self._deferred(), RETRY))
            finally:
                _thread.told = None
                _tries.ended += 1
        if any(isinstance(result, Change) and result.layers for result in results):
            for executor in told - {self}:
                executor.retry()
        return results

    def _followed(self, results: tuple[Result, ...]) -> tuple[Result, ...]:
        """Return results of what was done with those of deferred actions that could be done behind it."""
        latest = results
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
        with self.runner.recorded(Transaction(actions, why)):
            self.held.require_free(actions)
        return self.runner.commit(self.runner.prepare(actions, why))

    def _deferred(self) -> tuple[Action, ...]:
        """Return the actions that wait for pages, but for layers that a held transaction has."""
        return self.held.free_parts(self.runner.deferred())
