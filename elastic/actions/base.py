"""What an action is to the executor: one mechanism for each kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from elastic.types import Action, PlanStep


class ActionHandler(Protocol):
    """One kind of action. What `prepare` returns goes through `commit`, and `rollback` or `finish`."""

    def dry_run(self, action: Any) -> PlanStep:
        """What the action would do now. Raises if it cannot be done at all."""
        ...

    def prepare(self, action: Any) -> Any:
        """Check, and do what can be done beside forward passes. On an error nothing is held."""
        ...

    def commit(self, prepared: Any) -> None:
        """Flip, at the safe point."""
        ...

    def rollback(self, prepared: Any) -> None:
        """Undo `prepare`, and `commit` if it was reached; at the safe point."""
        ...

    def finish(self, prepared: Any) -> Any:
        """After the safe point: give back what is no longer needed; the result."""
        ...

    def deferred(self) -> Sequence[Action]:
        """Actions that were deferred, to be tried again when pages have come free."""
        ...
