"""When the places computed their parts of a batch: for the split of the next one, and for people."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from elastic.hooks.forward_state import ShardTiming
from elastic.hooks.replicas.load_balance import ThroughputEstimator
from elastic.hooks.replicas.worker import Mark

KEPT = 256


@dataclass(frozen=True)
class PendingTiming:
    """The same, while a device may still be on its way."""

    place: str
    device: torch.device
    rows: int
    tokens: int
    """In all of its rows."""
    marks: Sequence[tuple[Mark, Mark]]

    @property
    def over(self) -> bool:
        return all(isinstance(stop, float) or stop.query() for _, stop in self.marks)  # type: ignore[no-untyped-call]


class PassTimings:
    """The last passes. Times of a device are read when it has got there, so nothing waits for them."""

    def __init__(self, speeds: ThroughputEstimator) -> None:
        self._speeds = speeds
        self._lock = threading.Lock()
        self._passes: deque[tuple[ShardTiming, ...]] = deque(maxlen=KEPT)
        self._pending: deque[tuple[int, Sequence[PendingTiming]]] = deque(maxlen=KEPT)
        self._origins: dict[torch.device, tuple[torch.cuda.Event, float]] = {}

    def passed(self, courses: Sequence[PendingTiming], layers: int) -> None:
        """A batch has gone through so many layers."""
        with self._lock:
            self._pending.append((layers, courses))
            self._resolve()

    def passes(self) -> tuple[tuple[ShardTiming, ...], ...]:
        """Oldest first."""
        with self._lock:
            return tuple(self._passes)

    def _resolve(self) -> None:
        while self._pending and all(course.over for course in self._pending[0][1]):
            layers, courses = self._pending.popleft()
            parts = tuple(self._read(course, layers) for course in courses)
            self._passes.append(parts)
            for course, part in zip(courses, parts, strict=True):
                self._speeds.measured(part.place, course.tokens, part.seconds / layers)

    def _read(self, course: PendingTiming, layers: int) -> ShardTiming:
        spans = tuple((self._seconds(a, course.device), self._seconds(b, course.device)) for a, b in course.marks)
        return ShardTiming(course.place, course.rows, layers, spans)

    def _seconds(self, moment: Mark, device: torch.device) -> float:
        if isinstance(moment, float):
            return moment
        if device not in self._origins:
            origin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            origin.record(torch.cuda.current_stream(device))
            origin.synchronize()
            self._origins[device] = origin, time.perf_counter()
        event, at = self._origins[device]
        elapsed_ms: float = event.elapsed_time(moment)
        return at + elapsed_ms / 1e3
