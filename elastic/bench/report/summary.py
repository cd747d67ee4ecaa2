"""One run in figures, under the keys of `vllm bench serve`, and what is ours under `elastic` (docs/benchmarking.md)."""

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


def summarize(run: ReplayRun, *, detailed: bool = False) -> dict[str, Any]:
    """The result file of a run: vLLM's keys, and the object `elastic` (docs/benchmarking.md). JSON without NaN.

    With `detailed`, also vLLM's arrays: one entry for each request, or each token.
    """
    records = run.records
    completed = [r for r in records if r.completed]
    duration = _duration(run)
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
    """Whether a request was completed within every bound; one of a single token meets any bound on TPOT."""
    if not record.completed or record.ttft_s is None:
        return False
    bounds = ((record.ttft_s, slo.ttft_s), (record.tpot_s, slo.tpot_s), (record.e2el_s, slo.e2e_s))
    return all(took is None or most is None or took <= most for took, most in bounds)


def busiest_second(completed: Sequence[Record]) -> float:
    """The most tokens in one second, seconds counted from the first arrival, as vLLM counts them."""
    zero = min((r.arrival_s for r in completed), default=0.0)
    seconds = Counter(int(t - zero) for r in completed for t in r.token_times_s)
    return float(max(seconds.values(), default=0))


def most_at_once(completed: Sequence[Record]) -> int:
    """The most requests that were under way within one second, seconds counted as above, as vLLM counts them."""
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
    """Variant -> share of the work: of all pairs of a generated token and a layer. None where it is not known.

    A server counts them over all that it does meanwhile.
    """
    pairs = _pairs(run) or _counted_pairs(run.timeline)
    return {variant: count / pairs.total() for variant, count in pairs.items()} or None


def _pairs(run: ReplayRun) -> Counter[str]:
    """By what the records say of each token."""
    tokens = Counter(index for record in run.records for index in record.weights)
    pairs: Counter[str] = Counter()
    for index, count in tokens.items():
        for variant in run.weights[index]:
            pairs[variant] += count
    return pairs


def _counted_pairs(timeline: Sequence[EngineState]) -> Counter[str]:
    """By what a server counted from the first look to the last."""
    counted = [Counter(state.token_layers) for state in timeline if state.token_layers is not None]
    return counted[-1] - counted[0] if counted else Counter()


def kv_use(timeline: Sequence[EngineState], offered_s: float) -> dict[str, float | None]:
    """Used over capacity while requests were offered: mean, highest, and the share of samples that was almost full."""
    use = [
        s.kv_used_bytes / s.kv_capacity_bytes
        for s in timeline
        if s.kv_used_bytes is not None and s.kv_capacity_bytes and 0 <= s.t_s <= offered_s
    ]
    if not use:
        return {"mean": None, "max": None, "almost_full_share": None}
    return {"mean": fmean(use), "max": max(use), "almost_full_share": fmean(u > ALMOST_FULL for u in use)}


def _duration(run: ReplayRun) -> float:
    """First arrival to last completion; without one, to the end."""
    first = min((r.arrival_s for r in run.records), default=0.0)
    last = max((r.token_times_s[-1] for r in run.records if r.completed), default=run.end_s)
    return max(0.0, last - first)


def _rate(count: float, duration: float) -> float:
    return count / duration if duration > 0 else 0.0


def _latencies(completed: Sequence[Record]) -> dict[str, float | None]:
    samples = {
        "ttft": [r.ttft_s for r in completed if r.ttft_s is not None],
        "tpot": [r.tpot_s for r in completed if r.tpot_s is not None],
        "itl": [gap for r in completed for gap in r.itls_s],
        "e2el": [r.e2el_s for r in completed if r.e2el_s is not None],
    }
    found: dict[str, float | None] = {}
    for name, sample in samples.items():
        found |= described(name, "ms", sample, 1000.0)
    return found


def _arrays(records: Sequence[Record]) -> dict[str, Any]:
    """vLLM's arrays, in the order of the trace; 0.0 and [] for what a failed request never had, as there."""
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
    found = saturation(records, run.trace.duration_s, run.end_s)
    finishes = Counter(r.finish for r in records)
    last_arrival = max((r.arrival_s for r in records), default=0.0)
    return {
        "version": __version__,
        "offered": len(records),
        **{name: finishes[name] for name in ("rejected", "timeout", "cancelled", "unfinished")},
        "interrupted": run.interrupted,
        "slo": asdict(run.slo) if run.slo else None,
        "slo_attainment": None if good is None or not records else good / len(records),
        "over_saturated": found.over_saturated,
        "saturation": found.described(),
        "tail_s": max(0.0, run.end_s - last_arrival),
        **_waiting(records),
        **described("lateness", "ms", [r.submitted_s - r.arrival_s for r in records if r.submitted_s is not None], 1e3),
        **_disturbances(run.timeline),
        "kv_use": kv_use(run.timeline, run.trace.duration_s),
        "token_share_by_variant": shares(run),
        "tokens_by_weights": _tokens_by_weights(run),
        "weights": [list(form) for form in run.weights],
        "actions": [asdict(action) for action in run.actions],
        "state_timeline": [asdict(state) for state in run.timeline],
        "trace": run.trace.described(),
    }


def _waiting(records: Sequence[Record]) -> dict[str, float | None]:
    """Queueing delay, and the share of it all in which no KV block was to be had; the rest is for want of compute."""
    known = [(r.queued_s, r.waited_for_kv_s) for r in records if r.queued_s is not None]
    split = [(queued, kv) for queued, kv in known if kv is not None]
    total = math.fsum(queued for queued, _ in split)
    share = math.fsum(kv for _, kv in split) / total if total > 0 else None
    return described("queueing", "ms", [queued for queued, _ in known], 1000.0) | {"queueing_kv_share": share}


def _disturbances(timeline: Sequence[EngineState]) -> dict[str, int | None]:
    """What was counted during the run; the engine counts since it began."""
    names = ("preemptions", "stalls")
    if not timeline:
        return dict.fromkeys(names)
    return {name: getattr(timeline[-1], name) - getattr(timeline[0], name) for name in names}


def _tokens_by_weights(run: ReplayRun) -> list[int]:
    counts = Counter(index for record in run.records for index in record.weights)
    return [counts[index] for index in range(len(run.weights))]
