"""Arrival processes have the rate and the burstiness that they are asked for."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.bench.traces.generator import (
    ArrivalProcess,
    Fixed,
    Gamma,
    LikeTrace,
    Lognormal,
    OnOff,
    Poisson,
    Ramp,
    generate,
)
from elastic.bench.traces.trace import Trace, TraceRequest
from elastic.errors import ConfigError

ONE = Fixed(1, 1)


def gaps(trace: Trace) -> list[float]:
    times = [0.0, *(r.arrival_s for r in trace.requests)]
    return [b - a for a, b in itertools.pairwise(times)]


def within(count: int, expected: float, variance_factor: float = 1.0) -> bool:
    """Five standard deviations of a renewal process whose gaps have this squared coefficient of variation."""
    return abs(count - expected) <= 5 * math.sqrt(variance_factor * expected) + 1


@settings(max_examples=20)
@given(st.floats(0.5, 50), st.integers(0, 1000))
def test_poisson_arrivals_come_at_their_rate(rate: float, seed: int) -> None:
    duration = 1000 / rate
    assert within(len(generate(Poisson(rate), ONE, duration, seed=seed).requests), 1000)


@settings(max_examples=20)
@given(st.floats(0.5, 50), st.floats(0.1, 4), st.integers(0, 1000))
def test_gamma_arrivals_come_at_their_rate_whatever_the_burstiness(rate: float, shape: float, seed: int) -> None:
    trace = generate(Gamma(rate, shape), ONE, 1000 / rate, seed=seed)
    assert within(len(trace.requests), 1000, 1 / shape)


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_gaps_vary_by_one_over_the_root_of_the_burstiness(shape: float) -> None:
    sample = gaps(generate(Gamma(10, shape), ONE, 2000, seed=1))
    variation = statistics.pstdev(sample) / statistics.fmean(sample)
    assert variation == pytest.approx(1 / math.sqrt(shape), rel=0.05)


def test_lower_burstiness_makes_longer_queues() -> None:
    """vLLM's meaning: below 1 is burstier. The busiest second tells."""

    def busiest(shape: float) -> int:
        seconds = [int(r.arrival_s) for r in generate(Gamma(10, shape), ONE, 1000, seed=2).requests]
        return max(seconds.count(s) for s in set(seconds))

    assert busiest(0.1) > busiest(1.0) > busiest(10.0)


@settings(max_examples=20)
@given(st.floats(5, 50), st.floats(0, 5), st.integers(0, 100))
def test_on_and_off_have_rates_of_their_own(on: float, off: float, seed: int) -> None:
    trace = generate(OnOff(on, off, 10, 20), ONE, 600, seed=seed)
    burst = sum(r.arrival_s % 30 < 10 for r in trace.requests)
    assert within(burst, on * 200)
    assert within(len(trace.requests) - burst, off * 400)


@settings(max_examples=20)
@given(st.floats(0, 20), st.floats(1, 20), st.integers(0, 100))
def test_a_ramp_goes_from_one_rate_to_the_other_and_stays(first: float, last: float, seed: int) -> None:
    trace = generate(Ramp(first, last, 200), ONE, 400, seed=seed)
    early = sum(r.arrival_s < 100 for r in trace.requests)
    late = sum(r.arrival_s >= 200 for r in trace.requests)
    assert within(early, 100 * (first + (last - first) / 4))
    assert within(late, 200 * last)


@pytest.mark.parametrize("arrivals", [Poisson(5), Gamma(5, 0.5), OnOff(9, 1, 3, 5), Ramp(1, 9, 30)])
def test_a_trace_is_ordered_seeded_and_within_its_duration(arrivals: ArrivalProcess) -> None:
    trace = generate(arrivals, Lognormal(100, 1, 10, 1), 60, seed=7)
    times = [r.arrival_s for r in trace.requests]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < 60 == trace.duration_s
    assert trace == generate(arrivals, Lognormal(100, 1, 10, 1), 60, seed=7)
    assert trace != generate(arrivals, Lognormal(100, 1, 10, 1), 60, seed=8)
    assert times == [r.arrival_s for r in generate(arrivals, ONE, 60, seed=7).requests], "lengths move no arrival"
    assert str(arrivals) in trace.source


def test_lognormal_lengths_have_their_medians() -> None:
    requests = generate(Poisson(100), Lognormal(200, 0.8, 30, 1.2), 100, seed=3).requests
    assert statistics.median(r.prompt_tokens for r in requests) == pytest.approx(200, rel=0.05)
    assert statistics.median(r.output_tokens for r in requests) == pytest.approx(30, rel=0.05)
    logs = [math.log(r.prompt_tokens) for r in requests]
    assert statistics.stdev(logs) == pytest.approx(0.8, rel=0.05)
    assert min(r.output_tokens for r in requests) >= 1


def test_lengths_from_a_trace_come_in_pairs() -> None:
    source = Trace((TraceRequest(0, 10, 1), TraceRequest(0, 20, 2)), "a file")
    requests = generate(Poisson(10), LikeTrace(source), 20).requests
    assert {(r.prompt_tokens, r.output_tokens) for r in requests} == {(10, 1), (20, 2)}


def test_what_makes_no_sense_is_refused_in_words() -> None:
    for wrong in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="must be above 0"):
            Poisson(wrong)
        with pytest.raises(ConfigError, match="burstiness"):
            Gamma(1, wrong)
        with pytest.raises(ConfigError, match="on_s of on/off"):
            OnOff(1, 1, wrong, 1)
        with pytest.raises(ConfigError, match="length of a ramp"):
            Ramp(1, 1, wrong)
    with pytest.raises(ConfigError, match="off_rate"):
        OnOff(1, -1, 1, 1)
    with pytest.raises(ConfigError, match="cannot end at rate 0"):
        Ramp(1, 0, 1)
    with pytest.raises(ConfigError, match="rates of a ramp"):
        Ramp(0, 0, 1)
    with pytest.raises(ConfigError, match="output_tokens 0 must be at least 1"):
        Fixed(1, 0)
    with pytest.raises(ConfigError, match="sigmas"):
        Lognormal(1, -1, 1, 1)
    with pytest.raises(ConfigError, match="it has no requests"):
        LikeTrace(Trace((), "nothing"))
    with pytest.raises(ConfigError, match="brings no request within"):
        generate(Poisson(0.001), ONE, 0.001)
