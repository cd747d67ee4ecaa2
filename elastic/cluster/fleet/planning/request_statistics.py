"""What the requests that ended of late tell: how long an answer usually is, and when a queue should be empty."""

from __future__ import annotations

from collections import deque

LEAST_S, MOST_S = 1.0, 60.0


class AnswerLengths(deque[int]):
    """The tokens of the last answers that ended by themselves. Not thread-safe."""

    def usual(self) -> int | None:
        """Return the length that nine of ten of them do not exceed (P90); None: there are none yet."""
        if not self:
            return None
        return sorted(self)[-(-9 * len(self) // 10) - 1]


class DrainRate(deque[float]):
    """When the last requests ended, in seconds of one clock: how fast they do. Not thread-safe."""

    def wait_s(self, waiting: int, now_s: float) -> float:
        """Return in how many seconds so many requests should have begun, from 1 to 60."""
        if len(self) < 2:
            return LEAST_S
        rate = len(self) / max(1e-3, now_s - self[0])
        return min(MOST_S, max(LEAST_S, waiting / rate))
