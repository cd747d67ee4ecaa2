"""The figures of one run, under the keys of `vllm bench serve`, and ours under `elastic` (docs/benchmarking.md)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from elastic import __version__
from elastic.bench.replay.records import Record
from elastic.bench.replay.run import ReplayRun
from elastic.bench.replay.timeline import EngineState
from elastic.bench.report.saturation import saturation
from elastic.bench.report.statistics import described
from elastic.config import SLO

ALMOST_FULL = 0.95
MOST_ERRORS = 5
"""Reasons that a result has, those of the most requests."""


def summarize(run: ReplayRun, *, detailed: bool = False) -> dict[str, Any]:
    """Summarize a run for its result file: vLLM's keys, and the object `elastic`. JSON without NaN.

    With `detailed`, also vLLM's arrays: one entry for each request, or each token.
    """
    records = run.records
    completed = [r for r in records if r.completed]
    first = min((r.arrival_s for r in records), default=0.0)
    duration = max(0.0, max((r.token_times_s[-1] for r in completed), default=run.end_s) - first)
    good = sum(meets(r, run.slo) for r in records) if run.slo else None
    summary: dict[str, Any] = {
        "duration": duration,
        "completed": len(completed),
        "failed": len(records) - len(completed),
        "total_input_tokens": sum(r.prompt_tokens for r in completed),
        "total_output_tokens": sum(r.output_tokens for r in completed),
    }
    tokens = summary["total_input_tokens"] + summary["total_output_tokens"]
    summary |= {
        "request_throughput": _rate(len(completed), duration),
        "request_goodput": None if good is None else _rate(good, duration),
        "output_throughput": _rate(summary["total_output_tokens"], duration),
        "total_token_throughput": _rate(tokens, duration),
        "max_output_tokens_per_s": busiest_second(completed),
        "max_concurrent_requests": most_at_once(completed),
    }
    summary |= _latencies(completed)
    if detailed:
        summary |= _arrays(records)
    return summary | {"elastic": _elastic(run, good)}


def meets(record: Record, slo: SLO) -> bool:
    """Return whether a request was completed within every bound; one of a single token meets any bound on TPOT."""
    if not record.completed or record.ttft_s is None:
        return False
    bounds = ((record.ttft_s, slo.ttft_s), (record.tpot_s, slo.tpot_s), (record.e2el_s, slo.e2e_s))
    return all(took is None or most is None or took <= most for took, most in bounds)


def busiest_second(completed: Sequence[Record]) -> float:
    """Return the most tokens in one second, seconds counted from the first arrival, as vLLM counts them."""
    zero = min((r.arrival_s for r in completed), default=0.0)
    seconds = Counter(int(t - zero) for r in completed for t in r.token_times_s)
    return float(max(seconds.values(), default=0))


def most_at_once(completed: Sequence[Record]) -> int:
    """Return the most requests under way within one second, seconds counted from the first arrival, as in vLLM."""
    zero = min((r.arrival_s for r in completed), default=0.0)
    changes: Counter[int] = Counter()
    for record in completed:
        changes[int(record.arrival_s - zero)] += 1
        changes[int(record.token_times_s[-1] - zero) + 1] -= 1
    most = now = 0
    for second in sorted(changes):
        now += changes[second]
        most = max(most, now)
    return most


def shares(run: ReplayRun) -> dict[str, float] | None:
    """Return the share of each variant in all pairs of a generated token and a layer; None where it is not known.

    A server counts them over all that it does meanwhile.
    """
    pairs = _pairs(run)
    if not pairs:
        counted = [Counter(state.token_layers) for state in run.timeline if state.token_layers is not None]
        pairs = counted[-1] - counted[0] if counted else pairs
    return {variant: count / pairs.total() for variant, count in pairs.items()} or None


def _pairs(run: ReplayRun) -> Counter[str]:
    """Count pairs of a token and a layer by variant, from the records."""
    tokens = Counter(index for record in run.records for index in record.weights)
    pairs: Counter[str] = Counter()
    for index, count in tokens.items():
        for variant in run.weights[index]:
            pairs[variant] += count
    return pairs


def kv_use(timeline: Sequence[EngineState], offered_s: float) -> dict[str, float | None]:
    """Return used over capacity while requests were offered: mean, highest, and the share of almost full samples."""
    use = [
        s.kv_used_bytes / s.kv_capacity_bytes
        for s in timeline
        if s.kv_used_bytes is not None and s.kv_capacity_bytes and 0 <= s.t_s <= offered_s
    ]
    if not use:
        return {"mean": None, "max": None, "almost_full_share": None}
    return {"mean": fmean(use), "max": max(use), "almost_full_share": fmean(u > ALMOST_FULL for u in use)}


def _rate(count: float, duration: float) -> float:
    return count / duration if duration > 0 else 0.0


def _latencies(completed: Sequence[Record]) -> dict[str, float | None]:
    samples = {
        "ttft": [r.ttft_s for r in completed if r.ttft_s is not None],
        "tpot": [r.tpot_s for r in completed if r.tpot_s is not None],
        "itl": [gap for r in completed for gap in r.itls_s],
        "e2el": [r.e2el_s for r in completed if r.e2el_s is not None],
    }
    figures: dict[str, float | None] = {}
    for name, sample in samples.items():
        figures |= described(name, "ms", sample, 1000.0)
    return figures


def _arrays(records: Sequence[Record]) -> dict[str, Any]:
    """Return vLLM's arrays, in the order of the trace; 0.0 and [] for what a failed request never had, as there."""
    return {
        "input_lens": [r.prompt_tokens for r in records],
        "output_lens": [r.output_tokens for r in records],
        "ttfts": [r.ttft_s or 0.0 for r in records],
        "itls": [list(r.itls_s) for r in records],
        "latencies": [r.e2el_s or 0.0 for r in records],
        "start_times": [r.arrival_s for r in records],
        "queue_times": [r.queued_s for r in records],
        "errors": [r.error or ("" if r.completed else r.finish) for r in records],
    }


def _elastic(run: ReplayRun, good: int | None) -> dict[str, Any]:
    records = run.records
    offered_s = min(run.trace.duration_s, run.end_s) if run.interrupted else run.trace.duration_s
    test = saturation(records, offered_s, run.end_s)
    tokens = Counter(index for record in records for index in record.weights)
    finishes = Counter(r.finish for r in records)
    errors = Counter(r.error or r.finish for r in records if not r.completed)
    last_arrival = max((r.arrival_s for r in records), default=0.0)
    return {
        "version": __version__,
        "offered": len(records),
        **{name: finishes[name] for name in ("rejected", "timeout", "cancelled", "unfinished")},
        "errors": dict(errors.most_common(MOST_ERRORS)),
        "shorter": sum(r.completed and r.output_tokens < r.asked_tokens for r in records),
        "interrupted": run.interrupted,
        "slo": asdict(run.slo) if run.slo else None,
        "slo_attainment": None if good is None or not records else good / len(records),
        "over_saturated": test.over_saturated,
        "saturation": asdict(test),
        "tail_s": max(0.0, run.end_s - last_arrival),
        **_waiting(records),
        **described("lateness", "ms", [r.submitted_s - r.arrival_s for r in records if r.submitted_s is not None], 1e3),
        **_disturbances(run.timeline),
        "kv_use": kv_use(run.timeline, offered_s),
        "token_share_by_variant": shares(run),
        "tokens_by_weights": [tokens[index] for index in range(len(run.weights))],
        "weights": [list(form) for form in run.weights],
        "actions": [asdict(action) for action in run.actions],
        "state_timeline": [asdict(state) for state in run.timeline],
        "trace": run.trace.described(),
    }


def _waiting(records: Sequence[Record]) -> dict[str, float | None]:
    """Return queueing delays, and the share of them for want of KV blocks; the rest is for want of compute."""
    delays = [(r.queued_s, r.waited_for_kv_s) for r in records if r.queued_s is not None]
    split = [(queued, kv) for queued, kv in delays if kv is not None]
    total = math.fsum(queued for queued, _ in split)
    share = math.fsum(kv for _, kv in split) / total if total > 0 else None
    return described("queueing", "ms", [queued for queued, _ in delays], 1000.0) | {"queueing_kv_share": share}


def _disturbances(timeline: Sequence[EngineState]) -> dict[str, int | None]:
    """Return the counts of the run; the engine counts since it began."""
    names = ("preemptions", "stalls")
    if not timeline:
        return dict.fromkeys(names)
    return {name: getattr(timeline[-1], name) - getattr(timeline[0], name) for name in names}
