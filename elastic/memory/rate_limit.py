"""Copies at a bounded rate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class RateLimiter:
    """Spreads work over time, so that what computes beside it keeps its share of the memory's speed. Thread-safe."""

    CHUNK = 4 << 20
    """Bytes done at once: a fraction of a millisecond, and few enough turns at Python's lock."""
    LONGEST = 16 << 20
    """Bytes done at once while nothing computes beside it, before that is asked again."""

    def __init__(self, bytes_per_s: float | None = None, beside: Callable[[], bool] = lambda: True) -> None:
        self.bytes_per_s = bytes_per_s
        """None: no bound."""
        self._beside = beside
        self._lock = threading.Lock()
        self._due = 0.0

    @property
    def chunk(self) -> int | None:
        """Bytes to be done at once now; None: all."""
        if self.bytes_per_s is None:
            return None
        return self.CHUNK if self._beside() else self.LONGEST

    def acquire(self, nbytes: int) -> None:
        """Count bytes that were copied; return when more may be. At once where nothing computes beside it."""
        if self.bytes_per_s is not None and self._beside():
            with self._lock:
                now = time.monotonic()
                self._due = due = max(self._due, now) + nbytes / self.bytes_per_s
            time.sleep(due - now)
