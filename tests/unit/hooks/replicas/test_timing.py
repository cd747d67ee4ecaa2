"""The timings of places: those of a device are read from its events, whose intervals have the precision of float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic.hooks.replicas.load_balance import ThroughputEstimator
from elastic.hooks.replicas.timing import PassTimings, PendingTiming

HOUR_MS = 3.6e6


class Event:
    """An event of a device whose clock is moved by hand."""

    now_ms = 0.0

    def __init__(self, enable_timing: bool = True) -> None:
        self.record(None)

    def record(self, stream: Any) -> None:
        self.at_ms = Event.now_ms

    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: Event) -> float:
        return torch.tensor(later.at_ms - self.at_ms, dtype=torch.float32).item()


def a_pass(begin_ms: float, took_ms: float) -> PendingTiming:
    Event.now_ms = begin_ms
    start = Event()
    Event.now_ms += took_ms
    marks: Any = [(start, Event())]
    return PendingTiming("cuda:0", torch.device("cuda:0"), 1, 1, marks)


def test_a_pass_is_timed_as_finely_after_a_day_as_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    timings = PassTimings(ThroughputEstimator())
    for hour in range(30):
        timings.add([a_pass(hour * HOUR_MS, took_ms=1.6)], layers=1)
    spans = [shard.spans_s[0] for (shard,) in timings.passes()]
    assert [stop - start for start, stop in spans] == pytest.approx([1.6e-3] * 30, rel=1e-4)
    assert [start - spans[0][0] for start, _ in spans] == pytest.approx([3600 * hour for hour in range(30)], abs=1e-3)


def test_a_pass_is_timed_when_its_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    timings, done = PassTimings(ThroughputEstimator()), False
    monkeypatch.setattr(Event, "query", lambda event: done)
    timings.add([a_pass(0.0, 1.0)], layers=1)
    assert timings.passes() == ()
    done = True
    timings.add([a_pass(5.0, 2.0)], layers=1)
    assert [shard.seconds for (shard,) in timings.passes()] == pytest.approx([1e-3, 2e-3])
