"""A queue that grows is told from one that only goes up and down."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.bench.replay.records import Record
from elastic.bench.report.saturation import mean_concurrency, saturation

DURATION = 200.0


def served(rate: float, service_s: float, seed: int, *, timeout_s: float = 1e9) -> list[Record]:
    """Poisson arrivals at one server that takes as long for each; those who wait too long give up."""
    rng = random.Random(seed)
    records, now, free = [], rng.expovariate(rate), 0.0
    while now < DURATION:
        begin = max(now, free)
        gives_up = begin - now > timeout_s
        free = free if gives_up else begin + service_s
        times = () if gives_up else (begin + service_s,)
        ended = now + timeout_s if gives_up else begin + service_s
        finish = "timeout" if gives_up else "length"
        records.append(
            Record("r", now, 1, 1, now, begin, None, times, len(times), finish, ended)  # type: ignore[arg-type]
        )
        now += rng.expovariate(rate)
    return records


def end_of(records: list[Record]) -> float:
    return max(r.ended_s or 0.0 for r in records)


def test_an_overloaded_server_is_found_out_every_time() -> None:
    for seed in range(50):
        records = served(rate=2.0, service_s=0.8, seed=seed)
        found = saturation(records, DURATION, end_of(records))
        assert found.over_saturated, seed
        assert found.concurrency_slope_per_s == pytest.approx(2.0 - 1 / 0.8, abs=0.4)


def test_one_whose_clients_give_up_still_shows_until_they_do() -> None:
    records = served(rate=4.0, service_s=0.8, seed=1, timeout_s=150.0)
    assert saturation(records, DURATION, end_of(records)).over_saturated


@pytest.mark.parametrize("load", [*(pytest.param(load, marks=pytest.mark.long) for load in (0.3, 0.5)), 0.7])
@pytest.mark.slow
def test_a_server_that_keeps_up_is_seldom_accused(load: float) -> None:
    accused = 0
    for seed in range(200):
        records = served(rate=2.0, service_s=load / 2.0, seed=seed)
        accused += saturation(records, DURATION, end_of(records)).over_saturated
    assert accused <= 6, "more than 3 %"


def test_a_burst_in_the_middle_is_no_saturation() -> None:
    rng = random.Random(0)
    times = sorted([rng.uniform(0, 200) for _ in range(100)] + [rng.uniform(90, 100) for _ in range(100)])
    records, free = [], 0.0
    for now in times:
        free = max(now, free) + 0.2
        records.append(Record("r", now, 1, 1, now, None, None, (free,), 1, "length", free))
    assert not saturation(records, DURATION, end_of(records)).over_saturated


def test_too_little_is_not_judged() -> None:
    records = served(rate=2.0, service_s=0.8, seed=0)
    assert saturation(records[:19], DURATION, 500.0).concurrency_t is None
    assert not saturation([], DURATION, 0.0).over_saturated
    assert not saturation(records, 0.0, 0.0).over_saturated


@given(st.lists(st.tuples(st.floats(0, 90), st.floats(0, 30)), max_size=10), st.floats(0, 90), st.floats(1, 20))
def test_mean_concurrency_agrees_with_adding_up_small_steps(
    spans: list[tuple[float, float]], start: float, length: float
) -> None:
    records = [Record("r", a, 1, 1, a, None, None, (a + d,), 1, "length", a + d) for a, d in spans]
    steps = 2000
    moments = [start + (i + 0.5) * length / steps for i in range(steps)]
    naive = sum(sum(a <= t < a + d for a, d in spans) for t in moments) / steps
    assert mean_concurrency(records, start, start + length, 200) == pytest.approx(
        naive, abs=len(spans) * 2 / steps + 1e-9
    )


def test_a_request_without_an_end_lasts_to_the_end() -> None:
    waiting = Record("r", 5.0, 1, 1, 5.0, None, None, (), 0, "unfinished", None)
    assert mean_concurrency([waiting], 0, 10, end_s=8.0) == pytest.approx(0.3)
