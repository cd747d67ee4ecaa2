"""What an engine tells about its requests, and what follows from it."""

from __future__ import annotations

from typing import Literal

from elastic.controller.snapshot import Traffic

Outcome = Literal["completed", "cancelled", "failed", "rejected"]


class Counters:
    """Thread-safe; every call costs O(1). Times are seconds of `time.perf_counter`; None: now."""

    def arrived(self, request: str, prompt_tokens: int, at_s: float | None = None) -> None:
        """A request was offered."""

    def scheduled(self, request: str, at_s: float | None = None) -> None:
        """Its first tokens go into a forward pass."""

    def produced(self, request: str, tokens: int = 1, at_s: float | None = None) -> None:
        """Tokens were generated."""

    def ended(self, request: str, outcome: Outcome, at_s: float | None = None) -> None:
        """It is over. One never told of is ignored."""

    def stalled(self, requests: int = 1) -> None:
        """Running requests were left out of a step for want of KV blocks."""

    def preempted(self, requests: int = 1) -> None:
        """Running requests lost their cache."""

    def read(self, at_s: float | None = None) -> Traffic:
        """Everything as of now."""
        return Traffic()
