"""What a replay came to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elastic.bench.records import Record
from elastic.bench.timeline import Done, State
from elastic.bench.traces import Trace
from elastic.config import SLO


@dataclass(frozen=True)
class Run:
    """Everything that was measured. Times are seconds since the replay began."""

    trace: Trace
    records: tuple[Record, ...]
    """One for each request that was offered, in the trace's order."""
    end_s: float
    """When the last request had ended, or the replay was interrupted."""
    slo: SLO | None = None
    weights: tuple[tuple[str, ...], ...] = ()
    """What `Record.weights` index: for each form that the model had, the variants of its layers."""
    timeline: tuple[State, ...] = ()
    actions: tuple[Done, ...] = ()
    interrupted: bool = False
    """Ctrl-C: requests that had not ended are `unfinished`, later ones were not offered."""

    def summary(self, *, detailed: bool = False) -> dict[str, Any]:
        """The result file: vLLM's keys, and the object `elastic` (docs/benchmarking.md). JSON.

        With `detailed`, also vLLM's arrays: one entry for each request, or each token.
        """
        from elastic.bench.summary import summarize

        return summarize(self, detailed=detailed)
