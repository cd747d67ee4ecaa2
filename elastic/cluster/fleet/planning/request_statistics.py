"""What the requests that ended of late tell: how long an answer usually is, and when a queue should be empty."""

from __future__ import annotations

from collections import deque

LEAST_S, MOST_S = 1.0, 60.0


class AnswerLengths:
    """The tokens of the last 256 answers that ended by themselves. Not thread-safe."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=256)

    def note(self, *tokens: int) -> None:
        """Note that answers have ended."""
        self._lengths.extend(tokens)

    def usual(self) -> int | None:
        """Return the length that nine of ten of them do not exceed (P90); None: there are none yet."""
        if not self._lengths:
            return None
        return sorted(self._lengths)[-(-9 * len(self._lengths) // 10) - 1]


class DrainRate:
    """How fast requests end, by the last 64. Times are seconds of one clock. Not thread-safe."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=64)

    def note(self, at_s: float) -> None:
        """Note that a request has ended."""
        self._ends.append(at_s)

    def wait_s(self, waiting: int, now_s: float) -> float:
        """Return in how many seconds so many requests should have begun, from 1 to 60."""
        if len(self._ends) < 2:
            return LEAST_S
        rate = len(self._ends) / max(1e-3, now_s - self._ends[0])
        return min(MOST_S, max(LEAST_S, waiting / rate))
