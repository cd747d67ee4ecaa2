"""Whether the ranks of one model do the same: they prepare by themselves, and commit together or not at all (law 5)."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.types import Action

Layers = tuple[int, ...]
"""Decoder layers by index."""


class Agreement:
    """That of a model which one process has: there is nobody to ask.

    Under a sub-class, whose `several` is true, all ranks run the same jobs in the same order, and each transaction of a
    job is a round.
    """

    several = False

    def propose(self, actions: Sequence[Action], why: str) -> bool:
        """Return whether all ranks have been asked to begin this job; False: this process is to begin it by itself."""
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
