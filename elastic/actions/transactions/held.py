"""Transactions that are prepared in one call and end in another, for orchestrators outside.

Each has an id and a deadline: one that nobody ends by then is rolled back. How an id ended is remembered, so that a
call whose answer was lost can be made again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from elastic.actions.transactions.transaction import Transaction, TransactionRunner
from elastic.errors import ConfigError, NotFound, StateError
from elastic.types import Action, Prepared, ResizeKV, Result

logger = logging.getLogger(__name__)
MOST_HELD = 16
LONGEST_S = 3600.0
ENDED_KEPT = 1000
WHY = "prepared"


@dataclass
class HeldTransaction:
    """One that is prepared, and waits for its commit."""

    transaction: Transaction
    told: Prepared
    deadline_s: float
    """Seconds of `time.monotonic`."""


@dataclass(frozen=True)
class EndedTransaction:
    """How one ended."""

    results: tuple[Result, ...] = ()
    undone: str = ""
    """Why it was rolled back; empty: it was committed."""
    fault: str = ""
    """What failed behind the commit, when pages were to be given back."""


class HeldTransactions:
    """The transactions that are held. For the executor's thread; `told` may be read on any."""

    def __init__(self, runner: TransactionRunner) -> None:
        self._runner = runner
        self._held: dict[str, HeldTransaction] = {}
        self._ended: dict[str, EndedTransaction] = {}

    def told(self) -> tuple[Prepared, ...]:
        """Return what was told of those that are held, oldest first."""
        return tuple(held.told for held in tuple(self._held.values()))

    def prepare(self, id: str, actions: tuple[Action, ...], timeout_s: float) -> Prepared:
        """Prepare actions and hold them. The same id with the same actions is the same transaction.

        Raises what preparing raises, `CapacityError` where a part of an action would be deferred, `StateError` for
        layers that another holds, and for an id that has ended; then nothing is held.
        """
        held = self._held.get(id)
        if held is not None and held.transaction.actions == actions:
            return held.told
        if held is not None:
            raise ConfigError(f"id={id!r} is held for other actions; commit it or roll it back, or choose another id")
        if id in self._ended:
            raise StateError(f"id={id!r} {_in_words(self._ended[id])}; prepare again under another id")
        if len(self._held) >= MOST_HELD:
            raise StateError(
                f"{MOST_HELD} transactions are held, such as {next(iter(self._held))!r}; commit one or roll it back"
            )
        self.require_free(actions)
        steps = tuple(self._runner.handler(action).dry_run(action) for action in actions)
        transaction = self._runner.prepare(actions, WHY)
        try:
            for handler, state in transaction.prepared:
                handler.require_complete(state)
        except BaseException as error:
            self._runner.roll_back(transaction, str(error))
            raise
        moved, pages = sum(step.moved_bytes for step in steps), sum(step.transient_pages for step in steps)
        told = Prepared(id, steps, moved, pages, time.time() + timeout_s)
        self._held[id] = HeldTransaction(transaction, told, time.monotonic() + timeout_s)
        return told

    def commit(self, id: str) -> tuple[Result, ...]:
        """Commit what is held, or return the results of the commit before.

        Raises `StateError` if it was rolled back, `ConfigError` for an id that is not known.
        """
        if id not in self._held:
            ended = self._end_of(id)
            if ended.fault:
                raise StateError(f"id={id!r} was committed, but then failed: {ended.fault}")
            if ended.undone:
                raise StateError(f"id={id!r} {_in_words(ended)}; prepare it again under another id")
            return ended.results
        transaction = self._held.pop(id).transaction
        try:
            results = self._runner.commit(transaction)
        except BaseException as error:
            if transaction.committed:
                self._remember(id, EndedTransaction(fault=str(error) or repr(error)))
            else:
                self._remember(id, EndedTransaction(undone=f"it could not be committed: {error}"))
            raise
        self._remember(id, EndedTransaction(results))
        return results

    def roll_back(self, id: str, reason: str = "it was asked for") -> None:
        """Undo what is held; if it was undone before, nothing happens.

        Raises `StateError` if it was committed, `ConfigError` for an id that is not known.
        """
        if id in self._held:
            transaction = self._held.pop(id).transaction
            self._remember(id, EndedTransaction(undone=reason))
            self._runner.roll_back(transaction, f"rolled back: {reason}")
        elif not self._end_of(id).undone:
            raise StateError(f"id={id!r} was committed; undo it by the opposite actions")

    def expire(self) -> bool:
        """Roll back those whose deadline has passed; return whether there were any."""
        now = time.monotonic()
        late = [id for id, held in self._held.items() if held.deadline_s <= now]
        for id in late:
            self._give_up(id, "nobody committed it in time")
        return bool(late)

    def close(self) -> None:
        """Roll all of them back."""
        for id in list(self._held):
            self._give_up(id, "the model was unwrapped")

    def seconds_left(self) -> float | None:
        """Return the seconds until the next deadline; None: nothing is held."""
        deadlines = [held.deadline_s for held in self._held.values()]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def require_free(self, actions: Iterable[Action]) -> None:
        """Raise `StateError` for actions on layers, or on the KV limit of a place, that a held transaction has."""
        for id, held in self._held.items():
            theirs = {touched for action in held.transaction.actions for touched in _touches(action)}
            both = [touched for action in actions for touched in _touches(action) if touched in theirs]
            if both:
                left_s = max(0.0, held.deadline_s - time.monotonic())
                raise StateError(
                    f"{', '.join(dict.fromkeys(both))}: held by the prepared transaction {id!r} for at most "
                    f"{left_s:.1f} s more; commit({id!r}) or rollback({id!r}) first"
                )

    def free_parts(self, actions: Sequence[Action]) -> tuple[Action, ...]:
        """Return actions on layers without those layers that a held transaction has."""
        theirs = {
            layer
            for held in self._held.values()
            for action in held.transaction.actions
            if not isinstance(action, ResizeKV)
            for layer in action.layers
        }
        if not theirs:
            return tuple(actions)
        parts: list[Action] = []
        for action in actions:
            if isinstance(action, ResizeKV):
                parts.append(action)
            elif rest := tuple(layer for layer in action.layers if layer not in theirs):
                parts.append(replace(action, layers=rest))
        return tuple(parts)

    def _give_up(self, id: str, reason: str) -> None:
        try:
            self.roll_back(id, reason)
        except Exception:  # nobody waits for it: the thread goes on with what others ask
            logger.exception("the prepared transaction %r could not be rolled back cleanly", id)

    def _end_of(self, id: str) -> EndedTransaction:
        if id not in self._ended:
            raise NotFound(f"id={id!r} is no transaction of this model, or ended long ago; prepare returns the id")
        return self._ended[id]

    def _remember(self, id: str, ended: EndedTransaction) -> None:
        self._ended[id] = ended
        while len(self._ended) > ENDED_KEPT:
            del self._ended[next(iter(self._ended))]


def _touches(action: Action) -> list[str]:
    """List what an action changes, in words."""
    if isinstance(action, ResizeKV):
        return [f"the KV limit of {action.place}"]
    return [f"layer {layer}" for layer in action.layers]


def _in_words(ended: EndedTransaction) -> str:
    return f"was rolled back ({ended.undone})" if ended.undone else "was committed"
