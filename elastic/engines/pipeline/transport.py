"""What carries hidden states, and parts of them, between the ranks of one instance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from elastic.errors import RankLost, StateError


class Key(NamedTuple):
    """Which tensor: a sender and a receiver use each key once."""

    step: int
    layer: int
    """The layer that is given it; the number of layers: the final norm is."""
    site: int = 0
    """0: the hidden states in front of the layer. Else counts what its ranks exchange inside it, in order."""


@dataclass(frozen=True)
class StepFailure:
    """Why nothing more of a step will come: what is sent in its place."""

    reason: str
    lost: str = ""
    """The rank that was lost, if it was that."""

    @classmethod
    def of(cls, error: BaseException) -> StepFailure:
        """Return what another rank is told of an error."""
        return cls(str(error) or type(error).__name__, error.rank if isinstance(error, RankLost) else "")

    def error(self) -> StateError:
        """Return what a call raises that waited for something of the step."""
        return RankLost(self.reason, rank=self.lost) if self.lost else StateError(self.reason)


class Transport(Protocol):
    """Tensors to and from the other ranks of one instance. Thread-safe; each instance has one of its own.

    Every call raises `RankLost` when the other rank has gone, also one that waits.
    """

    def send(self, to: str, hidden: torch.Tensor, key: Key) -> None:
        """Send a tensor of any shape; returns at once, and the tensor may be changed then."""

    def receive(self, frm: str, like: torch.Tensor, key: Key) -> torch.Tensor:
        """Wait for a tensor of the shape, dtype and device of `like`; return it.

        Raises `StateError` for others, and where the rank has said by `fail` that it will not come.
        """

    def fail(self, to: str, step: int, failure: StepFailure) -> None:
        """Say that nothing more of a step will come, so that the other rank does not wait for it."""

    def forget(self, step: int) -> None:
        """Keep nothing that comes of a step, now or later: it has failed here."""

    def close(self) -> None:
        """End it; whoever waits in `receive` gets `RankLost`. Can be called twice."""
