"""The figures of a run, against an example worked out by hand and against naive definitions."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.bench.replay.records import Finish, Record, write_records
from elastic.bench.replay.run import ReplayRun
from elastic.bench.replay.timeline import EngineState, FinishedAction
from elastic.bench.report.statistics import described, quantile, slope
from elastic.bench.report.summary import busiest_second, kv_use, meets, most_at_once, shares, summarize
from elastic.bench.traces.trace import Trace, TraceRequest
from elastic.config import SLO
from elastic.errors import ConfigError
from support.bench.records import read_records

VLLM_KEYS = {
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
    "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
    "max_concurrent_requests",
    *(f"{s}_{m}_ms" for s in ("mean", "median", "std", "p95", "p99") for m in ("ttft", "tpot", "itl", "e2el")),
}  # fmt: skip


def record(arrival: float, times: tuple[float, ...] = (), finish: Finish = "length", **changes: Any) -> Record:
    plain = Record(
        id=f"r{arrival}",
        arrival_s=arrival,
        prompt_tokens=10,
        asked_tokens=3,
        submitted_s=arrival,
        scheduled_s=None,
        waited_for_kv_s=None,
        token_times_s=times,
        output_tokens=len(times),
        finish=finish,
        ended_s=times[-1] if times else arrival,
    )
    return replace(plain, **changes)


def run_of(*records: Record, end_s: float = 10.0, **more: Any) -> ReplayRun:
    requests = tuple(TraceRequest(r.arrival_s, r.prompt_tokens, r.asked_tokens) for r in records)
    return ReplayRun(Trace(requests, "by hand", "abc", (5.0, 9.0)), records, end_s, **more)


HAND = (
    record(1.0, (1.5, 1.75, 2.25), scheduled_s=1.25, waited_for_kv_s=0.25, submitted_s=1.002, weights=(0, 0, 1)),
    record(2.0, (4.0, 5.0), scheduled_s=3.5, waited_for_kv_s=0.5, weights=(1, 1)),
    record(2.5, (2.75,), weights=(0,)),
    record(3.0, finish="rejected", error="too many wait"),
)
WEIGHTS = (("float32",) * 4, ("float32", "int4", "int4", "int4"))
TIMELINE = (
    EngineState(0.0, 0, 0, 10, 100, {"float32": 4}, preemptions=2, stalls=1),
    EngineState(2.0, 1, 2, 98, 100, {"float32": 1, "int4": 3}, preemptions=2, stalls=4),
    EngineState(4.0, 0, 1, 60, 200, {"float32": 1, "int4": 3}, preemptions=3, stalls=5),
    EngineState(6.0, 0, 0, 200, 200, {"float32": 4}, preemptions=3, stalls=5),
)


def test_an_interrupted_run_is_over_saturated_by_what_was_offered_of_its_trace() -> None:
    """Each request waits a tenth longer than the one before it; a quarter of the trace was offered."""
    queue = [record(float(i), (1.1 * (i + 1),)) for i in range(100)]
    trace = Trace(tuple(TraceRequest(float(i), 10, 3) for i in range(400)), "by hand")
    whole = ReplayRun(replace(trace, requests=trace.requests[:100]), tuple(queue), 110.0)
    assert summarize(whole)["elastic"]["over_saturated"]
    ours = summarize(ReplayRun(trace, tuple(queue), 100.0, interrupted=True))["elastic"]
    assert ours["over_saturated"]
    assert ours["saturation"]["concurrency_slope_per_s"] > 0


def test_what_did_not_end_well_or_not_with_as_many_tokens_is_counted() -> None:
    bad = [record(float(i), finish="failed", error=f"reason {i % 7}") for i in range(7 * 3 + 2)]
    records = (record(0.0, (1.0, 2.0), "stop"), *HAND, *bad, record(99.0, finish="timeout"))
    ours = summarize(run_of(*records, weights=WEIGHTS))["elastic"]
    assert ours["shorter"] == 3, "three tokens are asked for"
    assert ours["errors"] == {f"reason {i}": 4 if i < 2 else 3 for i in range(5)}


def test_the_figures_of_an_example_worked_out_by_hand() -> None:
    run = run_of(*HAND, slo=SLO(ttft_s=1.0, tpot_s=0.5), weights=WEIGHTS, timeline=TIMELINE)
    summary = summarize(run)
    assert summary["duration"] == 4.0, "first arrival 1.0, last completion 5.0"
    assert (summary["completed"], summary["failed"]) == (3, 1)
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (30, 6)
    assert summary["request_throughput"] == 3 / 4
    assert summary["output_throughput"] == 6 / 4
    assert summary["total_token_throughput"] == 36 / 4
    assert summary["request_goodput"] == 2 / 4, "the second is late, the fourth was refused"
    assert summary["mean_ttft_ms"] == pytest.approx((500 + 2000 + 250) / 3)
    assert summary["median_ttft_ms"] == 500
    assert summary["p95_ttft_ms"] == pytest.approx(500 + 0.9 * 1500)
    assert summary["mean_tpot_ms"] == pytest.approx((375 + 1000) / 2)
    assert summary["median_itl_ms"] == 500, "of 250, 500 and 1000"
    assert summary["max_itl_ms"] == 1000
    assert summary["median_e2el_ms"] == pytest.approx(1250), "of 1250, 3000 and 250"
    assert summary["std_tpot_ms"] == pytest.approx(312.5)
    assert summary["max_output_tokens_per_s"] == 2.0, "1.5 and 1.75 in the first second, 2.25 and 2.75 in the next"
    assert summary["max_concurrent_requests"] == 3


def test_what_is_ours_of_the_same_example() -> None:
    ours = summarize(run_of(*HAND, slo=SLO(1.0, 0.5), weights=WEIGHTS, timeline=TIMELINE))["elastic"]
    assert ours["offered"] == 4
    assert ours["rejected"] == 1
    assert ours["slo_attainment"] == 2 / 4
    assert ours["tail_s"] == 7.0
    assert ours["mean_queueing_ms"] == pytest.approx((250 + 1500) / 2)
    assert ours["queueing_kv_share"] == pytest.approx(0.75 / 1.75)
    assert ours["max_lateness_ms"] == pytest.approx(2.0)
    assert (ours["preemptions"], ours["stalls"]) == (1, 4)
    assert ours["tokens_by_weights"] == [3, 3]
    assert ours["token_share_by_variant"] == {"float32": (3 * 4 + 3) / 24, "int4": 9 / 24}
    assert ours["kv_use"] == pytest.approx({"mean": (0.1 + 0.98 + 0.3) / 3, "max": 0.98, "almost_full_share": 1 / 3})
    assert ours["trace"]["file"] == "by hand"
    assert ours["trace"]["sha256"] == "abc"
    assert ours["trace"]["window"] == [5.0, 9.0]
    assert len(ours["state_timeline"]) == 4
    assert ours["over_saturated"] is False


def test_the_keys_are_vllms_and_arrays_come_when_asked_for() -> None:
    run = run_of(*HAND, weights=WEIGHTS)
    assert set(summarize(run)) >= VLLM_KEYS
    assert "ttfts" not in summarize(run)
    arrays = summarize(run, detailed=True)
    assert arrays["input_lens"] == [10] * 4
    assert arrays["output_lens"] == [3, 2, 1, 0]
    assert arrays["ttfts"] == [0.5, 2.0, 0.25, 0.0]
    assert arrays["itls"] == [[0.25, 0.5], [1.0], [], []]
    assert arrays["start_times"] == [1.0, 2.0, 2.5, 3.0]
    assert arrays["queue_times"] == [0.25, 1.5, None, None]
    assert arrays["errors"] == ["", "", "", "too many wait"]
    assert arrays["request_goodput"] is None, "no SLO was given"


def test_actions_are_in_the_file() -> None:
    action = FinishedAction(1.5, "swap", "kv 0.97", (3,), "int4", 100, 300, 5.0, 0.1, 0.2, True, "applied")
    written = summarize(run_of(*HAND, weights=WEIGHTS, actions=(action,)))["elastic"]["actions"]
    assert written[0]["kind"] == "swap"
    assert written[0]["reason"] == "kv 0.97"
    assert (written[0]["bytes"], written[0]["pause_ms"], written[0]["ok"]) == (100, 0.2, True)


@pytest.mark.parametrize("records", [(), (record(1.0, finish="failed"),), (record(1.0, (1.0,)),)])
def test_a_run_with_nothing_in_it_has_figures_too(records: tuple[Record, ...]) -> None:
    summary = summarize(run_of(*records, slo=SLO(1.0)), detailed=True)
    text = json.dumps(summary, allow_nan=False)
    assert json.loads(text)["mean_tpot_ms"] is None
    assert summary["elastic"]["slo_attainment"] == (None if not records else float(records[0].completed))


def test_an_slo_counts_every_bound_and_every_offered_request() -> None:
    good = record(0.0, (1.0, 1.5))
    assert meets(good, SLO(ttft_s=1.0, tpot_s=0.5))
    assert not meets(good, SLO(ttft_s=0.99))
    assert not meets(good, SLO(tpot_s=0.49))
    assert meets(good, SLO(e2e_s=1.5))
    assert not meets(good, SLO(e2e_s=1.49))
    assert meets(good, SLO())
    assert meets(record(0.0, (1.0,)), SLO(tpot_s=0.001)), "one token has no TPOT"
    for finish in ("cancelled", "failed", "rejected", "timeout", "unfinished"):
        assert not meets(record(0.0, (1.0, 1.5), finish=finish), SLO())
    assert not meets(record(0.0), SLO()), "completed without a token"


samples = st.lists(st.floats(0, 1e6), min_size=1, max_size=60)


@given(samples, st.floats(0, 1))
def test_a_quantile_lies_where_its_definition_says(sample: list[float], share: float) -> None:
    ordered = sorted(sample)
    place = share * (len(ordered) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    assert quantile(ordered, share) == pytest.approx(low + (high - low) * (place - math.floor(place)), rel=1e-9)


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=60))
def test_a_description_agrees_with_the_textbook(sample: list[float]) -> None:
    found = described("x", "s", sample)
    cuts = statistics.quantiles(sample, n=100, method="inclusive")
    assert found["p95_x_s"] == pytest.approx(cuts[94], rel=1e-6, abs=1e-9)
    assert found["p99_x_s"] == pytest.approx(cuts[98], rel=1e-6, abs=1e-9)
    assert found["median_x_s"] == pytest.approx(statistics.median(sample), rel=1e-9, abs=1e-9)
    mean = sum(sample) / len(sample)
    assert found["mean_x_s"] == pytest.approx(mean, rel=1e-9, abs=1e-9)
    spread = math.sqrt(sum((x - mean) ** 2 for x in sample) / len(sample))
    assert found["std_x_s"] == pytest.approx(spread, rel=1e-6, abs=1e-3)
    assert found["max_x_s"] == max(sample)


spans = st.lists(st.tuples(st.floats(0, 20), st.lists(st.floats(0, 5), min_size=1, max_size=5)), max_size=15)


@given(spans)
def test_the_busiest_seconds_agree_with_counting_each_second(spans: list[tuple[float, list[float]]]) -> None:
    records = [record(a, tuple(a + sum(gaps[: i + 1]) for i in range(len(gaps)))) for a, gaps in spans]
    zero = min((r.arrival_s for r in records), default=0.0)
    tokens = [sum(int(t - zero) == s for r in records for t in r.token_times_s) for s in range(60)]
    busy = [sum(int(r.arrival_s - zero) <= s <= int(r.token_times_s[-1] - zero) for r in records) for s in range(60)]
    assert busiest_second(records) == max(tokens)
    assert most_at_once(records) == max(busy)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1))
def test_shares_of_variants_sum_to_one(tokens: list[tuple[int, int]]) -> None:
    forms = tuple(("int4",) * i + ("float32",) * (3 - i) for i in range(4))
    records = tuple(record(float(i), weights=(index,) * n) for i, (index, n) in enumerate(tokens))
    found = shares(run_of(*records, weights=forms))
    assert found is not None
    total = sum(n for _, n in tokens)
    assert sum(found.values()) == pytest.approx(1)
    assert found.get("int4", 0.0) == pytest.approx(sum(index * n for index, n in tokens) / 3 / total)


def test_kv_use_without_a_cache_is_unknown() -> None:
    assert kv_use([EngineState(0.0, 0, 0)], 1.0) == {"mean": None, "max": None, "almost_full_share": None}


def test_a_slope_and_its_significance_by_hand() -> None:
    """Points (0,0), (1,2), (2,1), (3,3): slope 4/5, residual sum 9/5, standard error sqrt(9/5 / 2 / 5)."""
    line = slope([0, 1, 2, 3], [0, 2, 1, 3])
    assert line.per_s == pytest.approx(0.8)
    assert line.t == pytest.approx(0.8 / math.sqrt(1.8 / 2 / 5))
    assert slope([0, 1, 2], [0, 1, 2]).t == math.inf
    assert slope([0, 1, 2], [5, 5, 5]).t == 0.0


def test_records_come_back_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    write_records(path, HAND)
    assert tuple(read_records(path)) == HAND
    assert len(path.read_text().splitlines()) == len(HAND)


def test_records_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        write_records(tmp_path / "no" / "where", HAND)
