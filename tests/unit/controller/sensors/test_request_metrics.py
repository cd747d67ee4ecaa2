"""Counters against a reference that keeps everything and computes from the lists."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastic.controller.sensors.request_metrics import MOST_PENDING, TIMES, RequestMetrics
from elastic.controller.sensors.sliding_window import BUCKET_S, BUCKETS, LARGEST_S, RATIO, SMALLEST_S
from elastic.controller.snapshot import Quantiles, RequestStats
from elastic.errors import ConfigError

OUTCOMES = ("completed", "cancelled", "failed", "rejected")


@dataclass
class Naive:
    """What `RequestMetrics` says, kept in lists that grow."""

    now: float = -math.inf
    began: float | None = None
    requests: dict[str, dict[str, Any]] = field(default_factory=dict)
    seen: list[tuple[str, float, float]] = field(default_factory=list)  # what, when, value
    totals: dict[str, int] = field(default_factory=dict)

    def tell(self, what: str, request: str, at: float, number: int) -> None:
        self.now = max(self.now, at)
        self.began = at if self.began is None else self.began
        known = self.requests.get(request)
        if what == "arrived" and known is None:
            self.requests[request] = {"arrived": at, "times": []}
            self.add("arrived", 1)
            self.add("prompt_tokens", number)
            self.see("arrivals", 1)
        elif what == "scheduled" and known is not None:
            self.schedule(known, at)
        elif what == "produced" and known is not None and number > 0:
            self.schedule(known, at)
            times = known["times"]
            self.see(*("itl_s", at - max(t for t, _ in times)) if times else ("ttft_s", at - known["arrived"]))
            times.append((at, number))
            self.add("generated_tokens", number)
            self.see("tokens", number)
        elif what in OUTCOMES and known is not None:
            del self.requests[request]
            self.add(what, 1)
            times = known["times"]
            n = sum(number for _, number in times)
            if what == "completed" and n > 1:
                self.see("tpot_s", (max(t for t, _ in times) - times[0][0]) / (n - 1))

    def schedule(self, known: dict[str, Any], at: float) -> None:
        if "scheduled" not in known:
            known["scheduled"] = at
            self.see("queued_s", at - known["arrived"])

    def add(self, what: str, number: int) -> None:
        self.totals[what] = self.totals.get(what, 0) + number

    def see(self, what: str, value: float) -> None:
        self.seen.append((what, self.now, max(0.0, value)))

    def within(self, what: str) -> list[float]:
        oldest = math.floor(self.now / BUCKET_S) - BUCKETS + 1
        return [v for name, at, v in self.seen if name == what and math.floor(at / BUCKET_S) >= oldest]


def assert_agrees(found: Quantiles, values: list[float]) -> None:
    assert found.count == len(values)
    if not values:
        assert found == Quantiles()
        return
    assert found.mean == pytest.approx(sum(values) / len(values), rel=1e-6, abs=1e-9)
    for q, estimate in ((50, found.p50), (95, found.p95), (99, found.p99)):
        exact = sorted(values)[math.ceil(q * len(values) / 100) - 1]
        exact = min(exact, LARGEST_S)
        assert estimate == pytest.approx(exact, rel=math.sqrt(RATIO) - 1 + 1e-6, abs=SMALLEST_S)


times = st.one_of(st.floats(0, 200), st.floats(0, 1e-3), st.sampled_from([0.0, 29.0, 30.0, 31.0, 5000.0]))
calls = st.tuples(
    st.sampled_from(["arrived", "scheduled", "produced", "produced", "produced", *OUTCOMES]),
    st.sampled_from("abcde"),
    times,
    st.integers(-1, 5),
)


ARRIVES_TWICE = [("arrived", "a", 0.0, 1), ("arrived", "a", 30.0, 1), ("arrived", "b", 0.0, 1)]


@settings(max_examples=200, deadline=None)
@example(ARRIVES_TWICE, False)
@given(st.lists(calls, max_size=60), st.booleans())
def test_any_order_of_calls_agrees_with_the_lists(told: list[Any], in_order: bool) -> None:
    """Also ended twice, tokens for unknown requests, and time that runs backwards."""
    counters, naive = RequestMetrics(), Naive()
    for what, request, at, number in sorted(told, key=lambda c: c[2]) if in_order else told:
        naive.tell(what, request, at, number)
        if what == "arrived":
            counters.arrived(request, number, at)
        elif what == "scheduled":
            counters.scheduled(request, at)
        elif what == "produced":
            counters.produced(request, number, at)
        else:
            counters.ended(request, what, at)
    at = max(naive.now, 0.0)
    naive.now, naive.began = at, at if naive.began is None else naive.began
    traffic = counters.read(at)
    waiting = [r for r in naive.requests.values() if "scheduled" not in r]
    assert (traffic.waiting, traffic.running) == (len(waiting), len(naive.requests) - len(waiting))
    assert traffic.queue_delay_s == (max(0.0, at - waiting[0]["arrived"]) if waiting else 0.0)
    for name in ("arrived", "prompt_tokens", "generated_tokens", *OUTCOMES):
        assert getattr(traffic, name) == naive.totals.get(name, 0)
    for name in ("queued_s", "ttft_s", "tpot_s", "itl_s"):
        assert_agrees(getattr(traffic, name), naive.within(name))
    span = max(1.0, min(29 + at % 1, at - naive.began))
    assert traffic.tokens_per_s == pytest.approx(sum(naive.within("tokens")) / span)
    assert traffic.arrivals_per_s == pytest.approx(sum(naive.within("arrivals")) / span)


def test_one_request_is_measured_as_vllm_does() -> None:
    counters = RequestMetrics()
    counters.arrived("a", 7, 10.0)
    assert counters.read(10.5) == RequestStats(
        waiting=1, queue_delay_s=0.5, arrived=1, prompt_tokens=7, arrivals_per_s=1.0
    )
    counters.scheduled("a", 11.0)
    for at in (12.0, 12.1, 12.4):
        counters.produced("a", 1, at)
    counters.ended("a", "completed", 12.4)
    traffic = counters.read(12.4)
    assert (traffic.waiting, traffic.running, traffic.completed, traffic.generated_tokens) == (0, 0, 1, 3)
    assert traffic.queued_s.mean == pytest.approx(1.0)
    assert traffic.ttft_s.mean == pytest.approx(2.0)
    assert traffic.tpot_s.mean == pytest.approx(0.2)
    assert (traffic.itl_s.count, traffic.itl_s.mean) == (2, pytest.approx(0.2))
    assert traffic.ttft_s.ema == pytest.approx(2.0)


def test_sequences_side_by_side_share_the_steps() -> None:
    counters = RequestMetrics()
    counters.arrived("batch", 40, 0.0, sequences=4)
    for step in range(6):
        counters.produced("batch", 4, float(step))
    counters.ended("batch", "completed", 5.0)
    traffic = counters.read(5.0)
    assert traffic.generated_tokens == 24
    assert traffic.tpot_s.mean == traffic.itl_s.mean == pytest.approx(1.0)


def test_steps_are_counted_by_their_tokens() -> None:
    metrics = RequestMetrics()
    for tokens in (1, 1, 2, 3, 4, 5, 16, 17):
        metrics.stepped(tokens)
    now = metrics.read()
    assert (now.step_tokens, now.steps_by_tokens) == (49, (2, 1, 2, 1, 1, 1))


def test_what_is_old_leaves_the_window_but_not_the_totals() -> None:
    counters = RequestMetrics()
    counters.arrived("a", 1, 0.0)
    counters.produced("a", 5, 1.0)
    assert counters.read(2.0).ttft_s.count == 1
    traffic = counters.read(1000.0)
    assert (traffic.ttft_s, traffic.tokens_per_s, traffic.arrivals_per_s) == (Quantiles(), 0.0, 0.0)
    assert (traffic.generated_tokens, traffic.running) == (5, 1)


def size(counters: RequestMetrics) -> int:
    """How many objects it holds."""
    windows = sum(len(b) for name in TIMES for b in counters._windows[name]._bins)
    return len(counters._waiting) + len(counters._running) + windows


def test_nothing_grows_with_the_run() -> None:
    counters, sizes = RequestMetrics(), []
    for i in range(60_000):
        at = i / 100
        counters.arrived(str(i), 3, at)
        counters.produced(str(i - 5), 1, at)
        counters.produced(str(i - 9), 1, at)
        counters.ended(str(i - 10), OUTCOMES[i % 4], at)  # type: ignore[arg-type]
        if i % 10_000 == 9_999:
            sizes.append(size(counters))
    assert max(sizes) <= sizes[0] + 10


def test_a_time_that_is_none_is_now_and_one_that_is_no_number_too() -> None:
    counters = RequestMetrics()
    counters.arrived("a", 1)
    counters.produced("a", 1, math.nan)
    counters.produced("a", 1, math.inf)
    counters.ended("a", "completed", -math.inf)
    traffic = counters.read()
    assert (traffic.completed, traffic.generated_tokens, traffic.ttft_s.count) == (1, 2, 1)
    assert traffic.ttft_s.p99 is not None
    assert 0 <= traffic.ttft_s.p99 < 60


def test_threads_lose_nothing() -> None:
    counters = RequestMetrics()

    def drive(name: int) -> None:
        for i in range(300):
            counters.arrived(f"{name}-{i}", 2)
            counters.scheduled(f"{name}-{i}")
            counters.produced(f"{name}-{i}", 3)
            counters.ended(f"{name}-{i}", "completed")
            counters.stalled()
            counters.preempted(2)
            counters.read()

    threads = [threading.Thread(target=drive, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    traffic = counters.read()
    assert (traffic.arrived, traffic.completed, traffic.waiting, traffic.running) == (1200, 1200, 0, 0)
    assert (traffic.generated_tokens, traffic.stalls, traffic.preemptions) == (3600, 1200, 2400)


def test_steps_without_tokens_do_not_pile_up() -> None:
    counters = RequestMetrics()
    for step in range(3 * MOST_PENDING):
        counters.produced_together({}, float(step))
        assert len(counters._pending) < MOST_PENDING


def test_what_is_refused_arrived_and_brought_no_tokens() -> None:
    counters = RequestMetrics()
    counters.arrived("a", 7, 10.0)
    counters.refused(10.5)
    assert counters.read(11.0) == RequestStats(
        waiting=1, queue_delay_s=1.0, arrived=2, rejected=1, prompt_tokens=7, arrivals_per_s=2.0
    )


def test_an_outcome_that_is_none_is_refused_where_it_is_told() -> None:
    """Counted, it would have made every reading fail from then on, and so each tick of a controller."""
    counters = RequestMetrics()
    counters.arrived("a", 7, 10.0)
    with pytest.raises(ConfigError, match=r"outcome='done' cannot be; it must be one of completed, cancelled, failed"):
        counters.ended("a", "done", 11.0)
    assert counters.read(11.0).waiting == 1
    counters.ended("a", "completed", 11.0)
    assert counters.read(11.0).completed == 1
