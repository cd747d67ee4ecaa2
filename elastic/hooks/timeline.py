"""When the places computed their parts of a batch: for the split of the next one, and for people."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from elastic.hooks.lanes import Mark
from elastic.hooks.requests import TokenSpeeds
from elastic.hooks.shares import Speeds

KEPT = 256


@dataclass(frozen=True)
class PartTime:
    """What one place did in one pass of a batch through a run of replicated layers."""

    place: str
    rows: int
    """Under an engine, tokens."""
    layers: int
    spans_s: tuple[tuple[float, float], ...]
    """Seconds of `time.perf_counter` from beginning to end: of each layer; on CUDA of all together."""

    @property
    def seconds(self) -> float:
        return sum(stop - start for start, stop in self.spans_s)


@dataclass(frozen=True)
class _Pending:
    place: str
    device: torch.device
    rows: int
    layers: int
    marks: Sequence[tuple[Mark, Mark]]


class Timeline:
    """The last passes. Times of a device are read when it has got there, so nothing waits for them."""

    def __init__(self, speeds: Speeds, token_speeds: TokenSpeeds) -> None:
        self._speeds = speeds
        self._token_speeds = token_speeds
        self._lock = threading.Lock()
        self._passes: deque[tuple[PartTime, ...]] = deque(maxlen=KEPT)
        self._pending: deque[tuple[bool, bool, list[_Pending]]] = deque(maxlen=KEPT)
        self._origins: dict[torch.device, tuple[torch.cuda.Event, float]] = {}

    def passed(
        self,
        parts: Sequence[tuple[str, torch.device, int, Sequence[tuple[Mark, Mark]]]],
        layers: int,
        every: bool,
        *,
        tokens: bool = False,
    ) -> None:
        """Of each place its rows and marks; `every`: all places of the run took part, so they can be compared.

        `tokens`: rows are tokens of requests.
        """
        pending = [_Pending(place, device, rows, layers, marks) for place, device, rows, marks in parts]
        with self._lock:
            self._pending.append((every, tokens, pending))
            self._resolve()

    def passes(self) -> tuple[tuple[PartTime, ...], ...]:
        """Oldest first."""
        with self._lock:
            return tuple(self._passes)

    def _resolve(self) -> None:
        while self._pending and all(map(_reached, self._pending[0][-1])):
            every, tokens, pending = self._pending.popleft()
            parts = tuple(map(self._read, pending))
            self._passes.append(parts)
            if tokens:
                for part in parts:
                    self._token_speeds.measured(part.place, part.rows, part.seconds / part.layers)
            elif every:
                self._speeds.measured({part.place: part.seconds / part.rows / part.layers for part in parts})

    def _read(self, part: _Pending) -> PartTime:
        spans = tuple((self._seconds(a, part.device), self._seconds(b, part.device)) for a, b in part.marks)
        return PartTime(part.place, part.rows, part.layers, spans)

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


def _reached(part: _Pending) -> bool:
    return all(isinstance(stop, float) or stop.query() for _, stop in part.marks)  # type: ignore[no-untyped-call]
