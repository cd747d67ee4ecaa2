"""The result of a replay."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.bench.replay.records import Record
from elastic.bench.replay.timeline import EngineState, FinishedAction
from elastic.bench.traces.trace import Trace
from elastic.config import SLO


@dataclass(frozen=True)
class ReplayRun:
    """All measurements of a replay. Times are seconds since it began."""

    trace: Trace
    records: tuple[Record, ...]
    """One record for each request that was offered, in the trace's order."""
    end_s: float
    """The time when the last request had ended, or the replay was interrupted."""
    slo: SLO | None = None
    weights: tuple[tuple[str, ...], ...] = ()
    """The variants of all layers, for each form that the model had: `Record.weights` index them."""
    timeline: tuple[EngineState, ...] = ()
    actions: tuple[FinishedAction, ...] = ()
    interrupted: bool = False
    """True if Ctrl-C ended it: requests under way are `unfinished`, later ones were not offered."""
