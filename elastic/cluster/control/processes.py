"""A process that a fleet has started, as far as the fleet needs to know it."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Exit(NamedTuple):
    """How a process ended."""

    reason: str
    """In words."""
    by_signal: bool = False
    """Whether it was killed: it did nothing of its own will after the last that it said."""


class RankProcess(Protocol):
    """The process, thread or actor that a rank runs in. Thread-safe."""

    @property
    def ended(self) -> int | None:
        """A descriptor that is readable once it has ended; None: only the end of the connection tells."""

    def kill(self) -> None:
        """End it at once, whatever it does. Ended or closed already: nothing happens."""

    def wait(self, timeout_s: float) -> Exit | None:
        """Wait for its end, and return how it ended; None where that is not known after so long."""

    def close(self) -> None:
        """Give back what was kept to know it; it does not end it. Can be called twice."""
