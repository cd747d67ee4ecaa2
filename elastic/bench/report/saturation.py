"""A test for over-saturation: of a queue that grows for as long as requests come, figures measure the run's length.

The time in which requests are offered is divided into ten equal parts: averages over a part depend little on each
other, single requests in a queue very much. In each part: the mean number of requests that had arrived and not ended,
and the mean TTFT of those that arrived in it. A run is over-saturated if a straight line through each of the two rises
significantly: slope over standard error above Student's t, one-sided at 1 % for the degrees of freedom. (GuideLLM
stops on the same two slopes.) A trace whose load itself grows, such as a ramp, is flagged too, as it should be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from elastic.bench.replay.records import Record
from elastic.bench.report.statistics import slope

PARTS = 10
FEWEST_REQUESTS = 20
_STUDENT_1_PERCENT = {4: 3.747, 5: 3.365, 6: 3.143, 7: 2.998, 8: 2.896}
"""Degrees of freedom -> the critical value."""


@dataclass(frozen=True)
class Saturation:
    """The result of the test; slopes are None where there was too little to test."""

    over_saturated: bool
    concurrency_slope_per_s: float | None = None
    concurrency_t: float | None = None
    ttft_slope_s_per_s: float | None = None
    ttft_t: float | None = None


def saturation(records: Sequence[Record], offered_s: float, end_s: float) -> Saturation:
    """Test a run in which requests were offered for `offered_s` seconds, and which ended at `end_s`."""
    if len(records) < FEWEST_REQUESTS or offered_s <= 0:
        return Saturation(False)
    part = offered_s / PARTS
    middles = [(i + 0.5) * part for i in range(PARTS)]
    busy = [mean_concurrency(records, i * part, (i + 1) * part, end_s) for i in range(PARTS)]
    ttfts = [(m, t) for i, m in enumerate(middles) if (t := _mean_ttft(records, i * part, part, end_s)) is not None]
    if len(ttfts) - 2 not in _STUDENT_1_PERCENT:
        return Saturation(False)
    concurrency, ttft = slope(middles, busy), slope(*zip(*ttfts, strict=True))
    critical = _STUDENT_1_PERCENT[PARTS - 2], _STUDENT_1_PERCENT[len(ttfts) - 2]
    t_values = [t if math.isfinite(t) else None for t in (concurrency.t, ttft.t)]
    flagged = concurrency.t > critical[0] and ttft.t > critical[1]
    return Saturation(flagged, concurrency.per_s, t_values[0], ttft.per_s, t_values[1])


def mean_concurrency(records: Sequence[Record], start_s: float, stop_s: float, end_s: float) -> float:
    """Average the requests under way over [start, stop); one that never ended lasts to `end_s`."""
    ends = (end_s if r.ended_s is None else r.ended_s for r in records)
    overlaps = (min(stop_s, end) - max(start_s, r.arrival_s) for r, end in zip(records, ends, strict=True))
    return sum(max(0.0, overlap) for overlap in overlaps) / (stop_s - start_s)


def _mean_ttft(records: Sequence[Record], start_s: float, part: float, end_s: float) -> float | None:
    """Average the TTFT of the requests of an interval; one without a token waited at least until it ended."""
    waits = [
        (r.ended_s or end_s) - r.arrival_s if r.ttft_s is None else r.ttft_s
        for r in records
        if start_s <= r.arrival_s < start_s + part and r.finish != "rejected"
    ]
    return fmean(waits) if waits else None
