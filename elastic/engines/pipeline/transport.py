"""What carries hidden states between the ranks of one instance."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch


class Key(NamedTuple):
    """Which hidden states: a sender and a receiver use each key once."""

    step: int
    layer: int
    """The layer that is given them; the number of layers: the final norm is."""


class Transport(Protocol):
    """Hidden states to and from the other ranks of one instance. Thread-safe; each instance has one of its own.

    Every call raises `RankLost` when the other rank has gone, also one that waits.
    """

    def send(self, to: str, hidden: torch.Tensor, key: Key) -> None:
        """Send hidden states [1, tokens, hidden size]; returns at once, and the tensor may be changed then."""

    def receive(self, frm: str, like: torch.Tensor, key: Key) -> torch.Tensor:
        """Wait for hidden states of the shape, dtype and device of `like`; return them."""

    def fail(self, to: str, key: Key, why: str, lost: str = "") -> None:
        """Have whoever receives this key get an error in the place of hidden states; returns at once.

        It is `RankLost` of a rank that was `lost`, else `StateError`.
        """

    def close(self) -> None:
        """End it; whoever waits in `receive` gets `RankLost`. Can be called twice."""
