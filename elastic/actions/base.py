"""The interface of an action's handler to the executor: one handler for each kind of action."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from elastic.types import Action, PlanStep

Layers = tuple[int, ...]
"""Decoder layers by index."""


class ActionHandler(ABC):
    """One kind of action. What `prepare` returns goes through `commit`, and `rollback` or `finish`."""

    deferred: Callable[[], Sequence[Action]] = tuple
    """Returns the actions to be tried again when pages have come free; most kinds are refused without pages."""

    @abstractmethod
    def dry_run(self, action: Any) -> PlanStep:
        """Return what the action would do now. Raises if it cannot be done at all."""

    @abstractmethod
    def prepare(self, action: Any) -> Any:
        """Check, and do what can be done beside forward passes. On an error nothing is held."""

    def layers(self, prepared: Any) -> Layers:
        """Return the layers that a commit would switch, where that may depend on the pages to be had; else none."""
        return ()

    def shorten(self, prepared: Any, layers: Layers) -> None:
        """Switch only these layers, and defer the others."""
        return

    def require_complete(self, prepared: Any) -> None:
        """Raise `CapacityError` if a commit would defer a part of the action for want of pages."""
        return

    @abstractmethod
    def commit(self, prepared: Any) -> None:
        """Switch to what was prepared, at the safe point."""

    @abstractmethod
    def rollback(self, prepared: Any) -> None:
        """Undo `prepare`, and `commit` if it was reached; at the safe point."""

    @abstractmethod
    def finish(self, prepared: Any) -> Any:
        """Give back what is no longer needed, after the safe point; return the result."""
