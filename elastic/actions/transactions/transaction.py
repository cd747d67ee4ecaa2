"""Transactions: actions that are prepared together, then committed together between two forward passes, or undone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from elastic.actions.base import ActionHandler, Layers
from elastic.errors import ConfigError
from elastic.hooks.forward_gate import ForwardGate
from elastic.types import Action, Result

T = TypeVar("T")
RETRY = "pages came free"
"""Why deferred actions are tried again."""


@dataclass
class ActionTiming:
    """Milliseconds of the phases of one job."""

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


@dataclass
class Transaction:
    """Actions that have been prepared."""

    actions: tuple[Action, ...]
    why: str
    timing: ActionTiming = field(default_factory=ActionTiming)
    prepared: list[tuple[ActionHandler, Any]] = field(default_factory=list)
    """Each action's handler, and what its `prepare` returned."""
    committed: bool = False
    """Whether it was switched to: what fails from then on undoes nothing."""


class Agreement:
    """Whether the ranks of a model do the same; here that of a model which one process has: there is nobody to ask.

    Ranks prepare by themselves, and commit together or not at all (law 5). Under a sub-class, whose `several` is true,
    all ranks run the same jobs in the same order, and each transaction of a job is a round.
    """

    several = False

    def propose(self, actions: Sequence[Action], why: str) -> bool:
        """Return whether all ranks have been asked to begin this job; False: this process is to begin it by itself."""
        return False

    @property
    def proposed(self) -> bool:
        """Whether all ranks were asked to begin a job, and this one has not begun it."""
        return False

    def vote(self, layers: Sequence[Layers]) -> Sequence[Layers]:
        """Return the layers of each action that all ranks can switch now, of those that this one can.

        Waits for the others. Raises `StateError` if one of them refused: this one must roll back too.
        """
        return layers

    def refuse(self, error: BaseException) -> None:
        """Have all ranks roll the round back, since this one cannot do it."""

    def committed(self) -> None:
        """Note that this rank has done what was agreed."""


class TransactionRunner:
    """Takes transactions through their phases, and records how each action ended. For one thread."""

    def __init__(
        self,
        gate: ForwardGate,
        handlers: Mapping[type, ActionHandler],
        record: Callable[[ActionOutcome], object],
        agreement: Agreement,
    ) -> None:
        self.handlers = dict(handlers)
        self.agreement = agreement
        self._gate = gate
        self._record = record

    def handler(self, action: Action) -> ActionHandler:
        """Return the handler of an action. Raises `ConfigError` for what is no action of this model."""
        if type(action) not in self.handlers:
            kinds = ", ".join(kind.__name__ for kind in self.handlers)
            raise ConfigError(f"{action!r} is no action of this model; there are {kinds}")
        return self.handlers[type(action)]

    def deferred(self) -> tuple[Action, ...]:
        """Return the actions that wait for pages."""
        return tuple(action for handler in dict.fromkeys(self.handlers.values()) for action in handler.deferred())

    def prepare(self, actions: tuple[Action, ...], why: str) -> Transaction:
        """Prepare actions beside whatever runs. If one cannot be, everything is as before."""
        transaction = Transaction(actions, why)
        start = time.perf_counter()
        with self.recorded(transaction):
            try:
                for action in actions:
                    handler = self.handler(action)
                    transaction.prepared.append((handler, handler.prepare(action)))
            except BaseException as error:
                self.agreement.refuse(error)
                self._undo(transaction)
                raise
        transaction.timing.prepare_ms = (time.perf_counter() - start) * 1e3
        return transaction

    def commit(self, transaction: Transaction) -> tuple[Result, ...]:
        """Commit and finish; return the results in order. If one cannot commit, none is done: all is rolled back."""
        with self.recorded(transaction):
            self._agree(transaction)
            self._switch(transaction)
            self.agreement.committed()
            results = tuple(_each(transaction.prepared, lambda handler, state: handler.finish(state)))
        for action, result in zip(transaction.actions, results, strict=True):
            if transaction.why != RETRY or result.layers:
                self._record(ActionOutcome(action, transaction.why, transaction.timing, result))
        return results

    def roll_back(self, transaction: Transaction, reason: str) -> None:
        """Give back what was prepared, at the safe point, and record why."""
        self.record_failure(transaction, reason)
        self._undo(transaction)

    @contextmanager
    def recorded(self, transaction: Transaction) -> Iterator[None]:
        """Record an error in the `with` as the end of all actions."""
        try:
            yield
        except Exception as error:  # whatever it is: the record has it, and who asked gets it
            self.record_failure(transaction, str(error))
            raise

    def record_failure(self, transaction: Transaction, reason: str) -> None:
        """Record that none of the actions was done."""
        for action in transaction.actions:
            self._record(ActionOutcome(action, transaction.why, transaction.timing, None, reason))

    def _agree(self, transaction: Transaction) -> None:
        """Keep of what was prepared what all ranks have, or roll back with them."""
        try:
            agreed = self.agreement.vote([handler.layers(state) for handler, state in transaction.prepared])
            for (handler, state), layers in zip(transaction.prepared, agreed, strict=True):
                handler.shorten(state, layers)
        except BaseException:
            self._undo(transaction)
            raise

    def _switch(self, transaction: Transaction) -> None:
        """Commit between two forward passes: the safe point (law 6)."""
        start = time.perf_counter()
        with self._gate.exclusive() as waited_s:
            transaction.timing.wait_ms = waited_s * 1e3
            try:
                for handler, state in transaction.prepared:
                    handler.commit(state)
            except BaseException:
                _roll_back(transaction)
                raise
            transaction.committed = True
            transaction.timing.pause_ms = (time.perf_counter() - start - waited_s) * 1e3

    def _undo(self, transaction: Transaction) -> None:
        with self._gate.exclusive():
            _roll_back(transaction)


def _roll_back(transaction: Transaction) -> None:
    _each(transaction.prepared[::-1], lambda handler, state: handler.rollback(state))


def _each(prepared: Sequence[tuple[ActionHandler, Any]], end: Callable[[ActionHandler, Any], T]) -> list[T]:
    """End what was prepared, also behind one for which that fails; then raise the first error."""
    results, errors = [], []
    for handler, state in prepared:
        try:
            results.append(end(handler, state))
        except BaseException as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results
