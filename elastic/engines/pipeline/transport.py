"""What carries hidden states between the ranks of one instance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from elastic.errors import RankLost, StateError


class Key(NamedTuple):
    """Which hidden states: a sender and a receiver use each key once."""

    step: int
    layer: int
    """The layer that is given them; the number of layers: the final norm is."""


@dataclass(frozen=True)
class StepFailure:
    """Why hidden states will never come: what is sent in their place."""

    reason: str
    lost: str = ""
    """The rank that was lost, if it was that."""

    @classmethod
    def of(cls, error: BaseException) -> StepFailure:
        """Return what another rank is told of an error."""
        return cls(str(error) or type(error).__name__, error.rank if isinstance(error, RankLost) else "")

    def error(self) -> StateError:
        """Return what a call that waited for the hidden states raises."""
        return RankLost(self.reason, rank=self.lost) if self.lost else StateError(self.reason)


class Transport(Protocol):
    """Hidden states to and from the other ranks of one instance. Thread-safe; each instance has one of its own.

    Every call raises `RankLost` when the other rank has gone, also one that waits.
    """

    def send(self, to: str, hidden: torch.Tensor, key: Key) -> None:
        """Send hidden states [1, tokens, hidden size]; returns at once, and the tensor may be changed then."""

    def receive(self, frm: str, like: torch.Tensor, key: Key) -> torch.Tensor:
        """Wait for hidden states of the shape, dtype and device of `like`; return them.

        Raises `StateError` for others, and where the rank has said by `fail` that they will not come.
        """

    def fail(self, to: str, key: Key, failure: StepFailure) -> None:
        """Say that hidden states will not come, so that the other rank does not wait for them."""

    def forget(self, step: int) -> None:
        """Keep nothing that comes of a step, now or later: it has failed here."""

    def close(self) -> None:
        """End it; whoever waits in `receive` gets `RankLost`. Can be called twice."""
