"""Cutting and scaling a trace keeps what it promises, whatever the trace."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.bench.traces.trace import Trace, TraceRequest
from elastic.errors import ConfigError

requests = st.lists(
    st.builds(TraceRequest, st.floats(0, 1000), st.integers(1, 20_000), st.integers(1, 2_000)), min_size=1, max_size=50
).map(lambda rs: tuple(sorted(rs, key=lambda r: r.arrival_s)))
traces = requests.map(lambda rs: Trace(rs, "made up"))


def test_the_time_before_the_first_request_is_left_out_and_kept_in_mind() -> None:
    late = Trace((TraceRequest(1_000_000.5, 5, 5), TraceRequest(1_000_002.5, 5, 5)), "x")
    moved = late.from_first_arrival()
    assert [r.arrival_s for r in moved.requests] == [0.0, 2.0]
    assert (moved.offset_s, moved.described()["offset_s"], moved.duration_s) == (1_000_000.5, 1_000_000.5, 2.0)
    assert moved.from_first_arrival() is moved
    faster = late.with_rate(4, "stretch").from_first_arrival()
    assert [r.arrival_s for r in faster.requests] == [0.0, 0.5]
    assert faster.offset_s == pytest.approx(1_000_000.5), "in seconds of the source"
    cut = late.cut(1_000_000, 1_000_003)
    assert cut.from_first_arrival() is cut, "a window begins where it was said to"


@given(traces, st.floats(0, 900), st.floats(0.5, 200))
def test_a_window_has_the_requests_of_its_half_open_span_and_a_new_zero(
    trace: Trace, start: float, length: float
) -> None:
    inside = [r for r in trace.requests if start <= r.arrival_s < start + length]
    if not inside:
        with pytest.raises(ConfigError, match="no request of made up arrives"):
            trace.cut(start, start + length)
        return
    cut = trace.cut(start, start + length)
    assert [r.arrival_s for r in cut.requests] == [r.arrival_s - start for r in inside]
    assert cut.window == (start, start + length)
    assert cut.duration_s == pytest.approx(length)


@given(traces, st.floats(0.01, 1), st.integers(0, 5))
def test_thinning_keeps_a_share_of_the_requests_at_their_times(trace: Trace, scale: float, seed: int) -> None:
    thin = trace.with_rate(scale, "thin", seed=seed)
    assert len(thin.requests) == max(1, round(scale * len(trace.requests)))
    left = list(trace.requests)
    for request in thin.requests:
        left.remove(request)
    assert list(thin.requests) == sorted(thin.requests, key=lambda r: r.arrival_s)
    assert thin == trace.with_rate(scale, "thin", seed=seed)
    assert thin.duration_s == trace.duration_s or trace.window is None


@given(traces, st.floats(1, 20), st.integers(0, 5))
def test_upscaling_adds_requests_in_the_gaps_behind_others(trace: Trace, scale: float, seed: int) -> None:
    cut = trace.cut(0, 1001)
    more = cut.with_rate(scale, "upscale", seed=seed)
    assert len(more.requests) == round(scale * len(cut.requests))
    added = list(more.requests)
    for request in cut.requests:
        added.remove(request)  # all are there, at their times
    times = [request.arrival_s for request in cut.requests]
    gaps = Counter(bisect_right(times, request.arrival_s) - 1 for request in added if request.arrival_s not in times)
    assert not gaps.keys() - range(len(times)), "nothing comes before the first"
    assert max(gaps.values(), default=0) <= ceil(scale - 1)
    assert more.requests[-1].arrival_s <= cut.duration_s
    assert {(r.prompt_tokens, r.output_tokens) for r in added} <= {
        (r.prompt_tokens, r.output_tokens) for r in cut.requests
    }
    assert list(more.requests) == sorted(more.requests, key=lambda r: r.arrival_s)
    assert more == cut.with_rate(scale, "upscale", seed=seed)
    assert more.duration_s == cut.duration_s
    assert more.described()["rate_scale"] == scale


def test_upscaling_leaves_bursts_and_calms_where_they_were() -> None:
    times = [10 * number for number in range(10)] + [100 + number / 10 for number in range(100)] + [200, 300]
    trace = Trace(tuple(TraceRequest(float(at_s), 5, 5) for at_s in times), "x").cut(0, 400)
    more = trace.with_rate(7.5, "upscale")
    for begin_s, end_s in ((0, 100), (100, 110), (110, 400)):
        before, after = (sum(begin_s <= r.arrival_s < end_s for r in t.requests) for t in (trace, more))
        assert after == pytest.approx(7.5 * before, rel=0.1, abs=7.5)  # of the burst's last the copies come in its gap


@given(traces, st.floats(0.01, 10))
def test_stretching_keeps_every_request_and_divides_the_time(trace: Trace, scale: float) -> None:
    cut = trace.cut(0, 1001)
    stretched = cut.with_rate(scale, "stretch")
    assert [r.arrival_s for r in stretched.requests] == [r.arrival_s / scale for r in cut.requests]
    assert stretched.duration_s == pytest.approx(1001 / scale)
    assert stretched.described()["rate_scale"] == scale
    both = cut.with_rate(0.5, "thin").with_rate(scale, "stretch")
    assert both.described()["rate_scale"] == 0.5 * scale
    assert both.duration_s == stretched.duration_s


@given(traces, st.floats(0.001, 3), st.integers(2, 1024))
def test_scaled_requests_have_a_token_of_each_and_fit_the_context(trace: Trace, scale: float, most: int) -> None:
    scaled = trace.with_tokens(scale, most=most)
    clipped = 0
    for before, after in zip(trace.requests, scaled.requests, strict=True):
        prompt, output = (max(1, round(scale * n)) for n in (before.prompt_tokens, before.output_tokens))
        assert after.prompt_tokens >= 1
        assert after.output_tokens >= 1
        if prompt + output <= most:
            assert (after.prompt_tokens, after.output_tokens) == (prompt, output)
        else:
            assert after.prompt_tokens + after.output_tokens == most
            clipped += 1
    assert scaled.scaling.clipped == clipped
    assert scaled.described()["token_scale"] == scale


def test_a_clipped_request_keeps_its_proportion() -> None:
    trace = Trace((TraceRequest(0.0, 3000, 1000),), "x").with_tokens(most=400)
    assert trace.requests == (TraceRequest(0.0, 300, 100),)


@given(traces, st.floats(0.1, 500))
def test_the_densest_window_has_as_many_requests_as_any(trace: Trace, length: float) -> None:
    start, stop = trace.densest(length)
    times = [r.arrival_s for r in trace.requests]
    counts = [sum(a <= t < a + length for t in times) for a in times]
    assert sum(start <= t < stop for t in times) == max(counts)
    assert start == times[counts.index(max(counts))]


def test_what_makes_no_sense_is_refused_in_words() -> None:
    trace = Trace((TraceRequest(1.0, 5, 5), TraceRequest(2.0, 5, 5)), "x")
    with pytest.raises(ConfigError, match=r"window \[3, 2\) is empty"):
        trace.cut(3, 2)
    with pytest.raises(ConfigError, match="cut once, before it is scaled"):
        trace.with_rate(0.5).cut(0, 2)
    with pytest.raises(ConfigError, match="this trace was thinned or upscaled already"):
        trace.with_rate(0.5).with_rate(0.5)
    with pytest.raises(ConfigError, match="thinning only takes requests away; use the method 'upscale' or"):
        trace.with_rate(2.0)
    with pytest.raises(ConfigError, match="upscaling only adds requests; use the method 'thin'"):
        trace.with_rate(0.5, "upscale")
    with pytest.raises(ConfigError, match="rate method 'skip' is not known"):
        trace.with_rate(0.5, "skip")  # type: ignore[arg-type]
    for scale in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="must be above 0 and finite"):
            trace.with_tokens(scale)
    with pytest.raises(ConfigError, match=r"token scale 1e[+]308 must be at most 1,000,000"):
        trace.with_tokens(1e308)
    for scale in (1e12, 1e308):
        with pytest.raises(ConfigError, match=r"makes (2e[+]12|inf) requests; at most 10,000,000 can be"):
            trace.with_rate(scale, "upscale")
    with pytest.raises(ConfigError, match="most tokens 1 leaves no room"):
        trace.with_tokens(most=1)


def test_the_digest_tells_workloads_apart() -> None:
    one = Trace((TraceRequest(1.0, 5, 5),), "x")
    assert one.digest() == Trace((TraceRequest(1.0, 5, 5),), "another name").digest()
    assert one.digest() != Trace((TraceRequest(1.0, 5, 6),), "x").digest()
