"""Copies at a bounded rate, or behind what computes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal


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


class YieldingPace:
    """Has copies let pass what computes beside them, and is waited for. (KunServe, section 4.2) Thread-safe.

    A copy goes in chunks, and ahead of each it waits until nothing computes; on a rank that is never idle for so long
    that copies have a tenth of its time. Where both have one core, or one memory, a chunk that has begun is what a
    stage waits for: so it is a part of a stage's time, as long as that is worth a system call.
    """

    LEAST, MOST = 256 << 10, 4 << 20
    """Bytes of a chunk."""
    SHARE = 0.1
    """Of a stage's time, for a chunk."""
    PATIENCE = 9.0
    """For how long a chunk waits at the most, in units of what it takes itself."""
    LEAST_S = 1e-3
    """Seconds for what is done between two steps, however short these are."""

    def __init__(self, idle: Callable[[float], bool], stage_s: Callable[[], float]) -> None:
        """`idle` waits so many seconds for nothing to compute, and says if so; `stage_s` is what a stage takes."""
        self._idle, self._stage_s = idle, stage_s
        self.sending: Callable[[], bool] = lambda: False
        """Whether something waits to be sent that other ranks wait for."""
        self._bytes_per_s = {"copies": 0.0, "pages": 0.0}

    @property
    def chunk(self) -> int:
        """Bytes to be copied at once now."""
        return int(min(self.MOST, max(self.LEAST, self._bytes_per_s["copies"] * self._stage_s() * self.SHARE)))

    @property
    def between_s(self) -> float:
        """Seconds for which steps may wait at a time, between two of them."""
        return max(self.LEAST_S, self._stage_s() * self.SHARE)

    @contextmanager
    def copying(self, nbytes: int, what: Literal["copies", "pages"] = "copies") -> Iterator[None]:
        """Copy a chunk, or make or map pages for so much, when it may be, and learn what it takes."""
        earlier = self._bytes_per_s[what]
        self._let_pass(self.PATIENCE * nbytes / earlier if earlier else self._stage_s())
        began_s = time.perf_counter()
        yield
        rate = nbytes / max(1e-9, time.perf_counter() - began_s)
        self._bytes_per_s[what] += (rate - earlier) * (0.2 if earlier else 1.0)

    def _let_pass(self, most_s: float) -> None:
        os.sched_yield()  # who has come to compute, or has received what it waited for, is seen only once it runs
        until_s = time.monotonic() + most_s
        while (left_s := until_s - time.monotonic()) > 0:
            if not self.sending():
                self._idle(left_s)
                return
            time.sleep(min(left_s, 1e-4))
