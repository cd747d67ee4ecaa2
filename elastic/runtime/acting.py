"""What the parts of a runtime that have a file of their own are given by the whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from elastic.hooks.forward_state import ForwardState
from elastic.types import Action
from elastic.weights.model import ModelWeights

Layers = int | str | Iterable[int | str]


class Acting(ABC):
    """A model's weights, and the way to have actions done."""

    _weights: ModelWeights
    forward: ForwardState

    @abstractmethod
    def apply(self, actions: Sequence[Action], *, why: str = "by hand", wait: bool = True) -> Any:
        """Do actions, all or none."""
