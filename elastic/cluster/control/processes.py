"""A process that a fleet has started, as far as the fleet needs to know it."""

from __future__ import annotations

from typing import Protocol


class RankProcess(Protocol):
    """The process, thread or actor that a rank runs in. Thread-safe."""

    ended: int | None
    """A descriptor that is readable once it has ended; None: only the end of the connection tells."""

    def kill(self) -> None:
        """End it at once, whatever it does. Ended already: nothing happens."""

    def exit_reason(self, timeout_s: float) -> str | None:
        """Return in words how it ended; None where nobody knows after so long."""

    def close(self) -> None:
        """Give back what was kept to know it; it does not end it."""
