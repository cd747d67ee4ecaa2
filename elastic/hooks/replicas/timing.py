"""Timings of the places that computed a batch: for the split of the next one, and for people."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from elastic.hooks.forward_state import ShardTiming
from elastic.hooks.replicas.load_balance import ThroughputEstimator
from elastic.hooks.replicas.worker import Mark, mark

KEPT = 256
"""Passes."""


@dataclass(frozen=True)
class PendingTiming:
    """The work of one place in one pass, which its device may not have done yet."""

    place: str
    device: torch.device
    rows: int
    tokens: int
    """In all of its rows."""
    marks: Sequence[tuple[Mark, Mark]]
    """When a layer began and ended; on CUDA the first began and the last ended."""


class PassTimings:
    """The timings of the last passes. Those of a device are read when it is done, so nothing waits for them."""

    def __init__(self, speeds: ThroughputEstimator) -> None:
        self._speeds = speeds
        self._lock = threading.Lock()
        self._passes: deque[tuple[ShardTiming, ...]] = deque(maxlen=KEPT)
        self._pending: deque[tuple[int, Sequence[PendingTiming]]] = deque(maxlen=KEPT)
        self._origins: dict[torch.device, tuple[torch.cuda.Event, float]] = {}

    def add(self, timings: Sequence[PendingTiming], layers: int) -> None:
        """Add those of a batch that has gone through so many layers, by place."""
        with self._lock:
            self._pending.append((layers, timings))
            while self._pending:
                stops = [stop for timing in self._pending[0][1] for _, stop in timing.marks]
                if not all(isinstance(stop, float) or stop.query() for stop in stops):  # type: ignore[no-untyped-call]
                    return
                self._resolve(*self._pending.popleft())

    def passes(self) -> tuple[tuple[ShardTiming, ...], ...]:
        """Return the timings of each pass, by place, the oldest pass first."""
        with self._lock:
            return tuple(self._passes)

    def _resolve(self, layers: int, timings: Sequence[PendingTiming]) -> None:
        shards = []
        for timing in timings:
            spans = tuple(self._span(timing.device, start, stop) for start, stop in timing.marks)
            shards.append(ShardTiming(timing.place, timing.rows, layers, spans))
            self._speeds.measured(timing.place, timing.tokens, shards[-1].seconds / layers)
        self._passes.append(tuple(shards))

    def _span(self, device: torch.device, start: Mark, stop: Mark) -> tuple[float, float]:
        """Return when both marks were passed. A device tells intervals in float32: only short ones are exact."""
        if isinstance(start, float):
            assert isinstance(stop, float)
            return start, stop
        assert isinstance(stop, torch.cuda.Event)
        if device not in self._origins:
            now = mark(device)
            assert isinstance(now, torch.cuda.Event)
            now.synchronize()
            self._origins[device] = now, time.perf_counter()
        origin, origin_s = self._origins[device]
        start_s = origin_s + origin.elapsed_time(start) / 1e3
        self._origins[device] = start, start_s
        return start_s, start_s + start.elapsed_time(stop) / 1e3
