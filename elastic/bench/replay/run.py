"""What a replay came to."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.bench.replay.records import Record
from elastic.bench.replay.timeline import EngineState, FinishedRequest
from elastic.bench.traces.trace import Trace
from elastic.config import SLO


@dataclass(frozen=True)
class ReplayRun:
    """Everything that was measured. Times are seconds since the replay began."""

    trace: Trace
    records: tuple[Record, ...]
    """One for each request that was offered, in the trace's order."""
    end_s: float
    """When the last request had ended, or the replay was interrupted."""
    slo: SLO | None = None
    weights: tuple[tuple[str, ...], ...] = ()
    """What `Record.weights` index: for each form that the model had, the variants of its layers."""
    timeline: tuple[EngineState, ...] = ()
    actions: tuple[FinishedRequest, ...] = ()
    interrupted: bool = False
    """Ctrl-C: requests that had not ended are `unfinished`, later ones were not offered."""
