"""A replay offers every request at its time, writes down what happens, and never hangs."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.bench.replay.open_loop import LEAD_S, ReplayOptions, replay
from elastic.bench.replay.recorder import Recorder
from elastic.bench.replay.run import ReplayRun
from elastic.bench.report.summary import summarize
from elastic.bench.traces.generator import Fixed, Lognormal, Poisson, generate
from elastic.bench.traces.prompts import Prompt, random_prompts
from elastic.bench.traces.trace import Trace, TraceRequest
from elastic.config import SLO
from elastic.controller.sensors.request_metrics import RequestMetrics
from elastic.controller.snapshot import RequestStats
from elastic.engines.base import Listener, Output, Request
from elastic.errors import CapacityError, ConfigError, Overloaded, StateError
from support.child_process import in_fork
from support.serving.fake_engine import FakeEngine, token_after


def offered(n: int, *, gap_s: float = 0.002, prompt: int = 4, output: int = 3) -> Trace:
    return Trace(tuple(TraceRequest(i * gap_s, prompt, output) for i in range(n)), "made up")


def prompts_for(trace: Trace) -> list[Prompt]:
    return random_prompts(trace, 100)


class Scripted:
    """An engine that does with each request what the test says."""

    counters = RequestMetrics()
    runtime = None
    weights: tuple[tuple[str, ...], ...] = (("float32",),)

    def __init__(self, answer: Callable[[Request, Listener], None]) -> None:
        self._answer = answer
        self.submitted: list[Request] = []
        self.cancelled: list[str] = []

    def start(self) -> None: ...

    def submit(self, request: Request, listener: Listener) -> None:
        self.submitted.append(request)
        self._answer(request, listener)

    def cancel(self, request: str) -> None:
        self.cancelled.append(request)

    def stop(self, *, drain: bool = True, timeout_s: float | None = None) -> None: ...


@contextmanager
def serving(**options: Any) -> Iterator[FakeEngine]:
    engine = FakeEngine(**options)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop(drain=False, timeout_s=30)


def test_each_request_gets_its_tokens_and_a_record() -> None:
    trace = generate(Poisson(300), Lognormal(5, 0.5, 4, 0.5), 0.3, seed=1)
    prompts = prompts_for(trace)
    with serving() as engine:
        run = replay(engine, trace, prompts, SLO(ttft_s=30.0))
    assert len(run.records) == len(trace.requests)
    for record, wanted, prompt in zip(run.records, trace.requests, prompts, strict=True):
        assert record.arrival_s == wanted.arrival_s
        assert record.tokens == tuple(token_after(prompt, k) for k in range(wanted.output_tokens))
        assert len(record.token_times_s) == record.output_tokens == wanted.output_tokens
        assert record.finish == "length"
        assert record.submitted_s is not None
        assert record.arrival_s <= record.submitted_s <= record.token_times_s[0]
        assert record.weights == (0,) * wanted.output_tokens
    summary = summarize(run)
    assert summary["completed"] == len(trace.requests)
    assert summary["elastic"]["slo_attainment"] == 1.0
    assert summary["elastic"]["token_share_by_variant"] == {"float32": 1.0}


def test_arrivals_wait_for_nobody() -> None:
    """An engine that answers nothing until the last request has been submitted: a closed loop would never end."""
    heard: list[tuple[Request, Listener]] = []

    def answer(request: Request, listener: Listener) -> None:
        heard.append((request, listener))
        if len(heard) == 20:
            for each, tell in heard:
                tell(Output(each.id, (1,), "length", at_s=time.perf_counter()))

    run = replay(Scripted(answer), offered(20), prompts_for(offered(20)), options=ReplayOptions(timeout_s=30))
    assert summarize(run)["completed"] == 20


def test_a_request_arrived_when_the_trace_says_and_lateness_is_waiting() -> None:
    def slowly(request: Request, listener: Listener) -> None:
        time.sleep(0.02)  # submitting takes longer than the gaps between arrivals
        listener(Output(request.id, (1,), "length", at_s=time.perf_counter()))

    engine = Scripted(slowly)
    trace = offered(10)
    run = replay(engine, trace, prompts_for(trace))
    arrived = [r.arrived_s for r in engine.submitted]
    gaps = [b - a for a, b in itertools.pairwise(t for t in arrived if t is not None)]
    assert gaps == pytest.approx([0.002] * 9)
    last = run.records[-1]
    assert last.submitted_s is not None
    assert last.ttft_s is not None
    assert last.ttft_s >= last.submitted_s - last.arrival_s >= 9 * 0.018
    assert summarize(run)["elastic"]["max_lateness_ms"] >= 9 * 18


def test_what_the_engine_tells_of_waiting_is_kept() -> None:
    def answer(request: Request, listener: Listener) -> None:
        assert request.arrived_s is not None
        at = request.arrived_s + 2.0
        listener(Output(request.id, (7,), at_s=at, scheduled_s=request.arrived_s + 1.5, waited_for_kv_s=0.5, weights=0))
        listener(Output(request.id, (8,), "stop", at_s=at + 1.0))

    trace = offered(1)
    record = replay(Scripted(answer), trace, prompts_for(trace)).records[0]
    assert record.queued_s == pytest.approx(1.5)
    assert record.waited_for_kv_s == 0.5
    assert record.ttft_s == pytest.approx(2.0)
    assert record.tpot_s == pytest.approx(1.0)
    assert record.finish == "stop"


def test_refusals_are_recorded_and_the_rest_goes_on() -> None:
    errors: list[Exception] = [
        Overloaded("full", retry_after_s=1.0),
        CapacityError("never fits", requested_bytes=2, free_bytes=1, total_bytes=1),
        ConfigError("nonsense"),
        StateError("not serving"),
    ]

    def answer(request: Request, listener: Listener) -> None:
        number = int(request.id.rsplit("-", 1)[1])
        if number < len(errors):
            raise errors[number]
        listener(Output(request.id, (), "failed", "broken", time.perf_counter()))

    trace = offered(5)
    run = replay(Scripted(answer), trace, prompts_for(trace), SLO(1.0))
    assert [r.finish for r in run.records] == ["rejected", "rejected", "failed", "failed", "failed"]
    assert run.records[0].error == "full (retry after 1.0 s)"
    assert run.records[4].error == "broken"
    assert summarize(run)["failed"] == 5
    assert summarize(run)["elastic"]["rejected"] == 2
    assert summarize(run)["elastic"]["slo_attainment"] == 0.0


def test_a_request_that_takes_too_long_is_cancelled_and_counts_as_missed() -> None:
    engine = Scripted(lambda request, listener: listener(Output(request.id, (1,), at_s=time.perf_counter())))
    trace = offered(3)
    run = replay(engine, trace, prompts_for(trace), options=ReplayOptions(timeout_s=0.1))
    assert [r.finish for r in run.records] == ["timeout"] * 3
    assert engine.cancelled == [r.id for r in run.records]
    assert all(r.output_tokens == 1 and not r.completed for r in run.records)


def test_a_fault_of_the_engine_ends_the_replay_instead_of_hanging_it() -> None:
    def broken(request: Request, listener: Listener) -> None:
        raise ZeroDivisionError("a bug")

    trace = offered(3)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        replay(Scripted(broken), trace, prompts_for(trace), options=ReplayOptions(timeout_s=60))


def test_a_replay_that_fails_leaves_nothing_that_goes_on() -> None:
    def answer(request: Request, listener: Listener) -> None:
        if len(engine.submitted) == 2:
            raise RuntimeError("a fault")

    engine, trace = Scripted(answer), offered(3)
    with pytest.raises(RuntimeError, match="a fault"):
        replay(engine, trace, prompts_for(trace))
    assert engine.submitted[0].id in engine.cancelled
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("elastic-bench")]


def test_where_a_request_cannot_be_cancelled_a_replay_that_fails_ends_all_else() -> None:
    """And takes no last sample, of which a fault would hide the first one."""

    class Failing(Scripted):
        def cancel(self, request: str) -> None:
            super().cancel(request)
            if request == engine.submitted[0].id:
                raise OSError("no way to it")

    class Watched(RequestMetrics):
        def read(self, at_s: float | None = None) -> RequestStats:
            assert threading.current_thread().name == "elastic-bench-sampler" or not engine.submitted
            return RequestStats(waiting=0, running=0)

    def answer(request: Request, listener: Listener) -> None:
        if len(engine.submitted) == 3:
            raise RuntimeError("a fault")

    engine, trace = Failing(answer), offered(3)
    engine.counters = Watched()
    with pytest.raises(OSError, match="no way to it") as raised:
        replay(engine, trace, prompts_for(trace))
    assert str(raised.value.__context__) == "a fault"
    assert sorted(engine.cancelled) == [request.id for request in engine.submitted]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("elastic-bench")]


def test_a_first_look_at_the_state_may_take_long_and_no_request_is_late_by_it() -> None:
    class Slow(RequestMetrics):
        seen_s: float | None = None

        def read(self, at_s: float | None = None) -> RequestStats:
            if self.seen_s is None:
                time.sleep(2 * LEAD_S)
                self.seen_s = time.perf_counter()
            return RequestStats(waiting=0, running=0)

    engine = Scripted(lambda request, listener: listener(Output(request.id, (1,), "length", at_s=time.perf_counter())))
    engine.counters = slow = Slow()
    trace = offered(1)
    replay(engine, trace, prompts_for(trace))
    (request,) = engine.submitted
    assert request.arrived_s is not None
    assert slow.seen_s is not None
    assert request.arrived_s > slow.seen_s


def test_warm_up_requests_come_first_and_are_not_recorded() -> None:
    engine = Scripted(lambda request, listener: listener(Output(request.id, (1,), "length", at_s=time.perf_counter())))
    trace = offered(4)
    prompts = prompts_for(trace)
    run = replay(engine, trace, prompts, options=ReplayOptions(warmup=2))
    assert len(run.records) == 4
    assert [r.prompt for r in engine.submitted] == [prompts[0][::-1], prompts[1][::-1], *prompts]
    assert len({r.id for r in engine.submitted}) == 6


def test_a_warm_up_that_fails_says_so_before_anything_is_measured() -> None:
    def refuse(request: Request, listener: Listener) -> None:
        raise StateError("not serving")

    trace = offered(3)
    with pytest.raises(StateError, match="warm-up request ended as failed: not serving"):
        replay(Scripted(refuse), trace, prompts_for(trace), options=ReplayOptions(warmup=1))
    with pytest.raises(StateError, match=r"not answered within 0\.05 s"):
        replay(Scripted(lambda *_: None), trace, prompts_for(trace), options=ReplayOptions(warmup=1, timeout_s=0.05))


def test_the_state_is_sampled_from_beginning_to_end() -> None:
    class Counting(RequestMetrics):
        reads = 0

        def read(self, at_s: float | None = None) -> RequestStats:
            self.reads += 1
            return RequestStats(waiting=self.reads, running=2, preemptions=self.reads, stalls=5)

    engine = Scripted(lambda request, listener: listener(Output(request.id, (1,), "length", at_s=time.perf_counter())))
    engine.counters = Counting()
    trace = offered(10, gap_s=0.01)
    run = replay(engine, trace, prompts_for(trace), options=ReplayOptions(sample_every_s=0.01))
    assert [s.waiting for s in run.timeline] == list(range(1, len(run.timeline) + 1))
    assert len(run.timeline) >= 4
    assert run.timeline[0].t_s == 0.0, "before the first request"
    assert run.timeline[0].layers == {"float32": 1}
    assert run.timeline[-1].t_s >= run.records[-1].arrival_s
    assert summarize(run)["elastic"]["preemptions"] == len(run.timeline) - 1


def test_progress_is_shown_while_it_runs() -> None:
    shown: list[tuple[int, int]] = []

    @contextmanager
    def progress(total: int) -> Iterator[Callable[[int, int], None]]:
        assert total == 5
        yield lambda ended, submitted: shown.append((ended, submitted))

    trace = offered(5)
    with serving() as engine:
        replay(engine, trace, prompts_for(trace), progress=progress)
    assert shown[-1] == (5, 5)
    assert all(ended <= submitted for ended, submitted in shown)


def test_prompts_of_other_lengths_and_wrong_options_are_refused() -> None:
    trace = offered(2)
    with pytest.raises(ConfigError, match="as many tokens each"):
        replay(Scripted(lambda *_: None), trace, [(1, 2, 3, 4)])
    for arrival_s in (1e300, float("inf")):
        late = replace(trace, requests=(trace.requests[0], replace(trace.requests[1], arrival_s=arrival_s)))
        with pytest.raises(ConfigError, match=r"comes after .* s; cut the trace before 1e[+]09 s"):
            replay(Scripted(lambda *_: None), late, prompts_for(late))
    with pytest.raises(ConfigError, match="warmup -1"):
        ReplayOptions(warmup=-1)
    with pytest.raises(ConfigError, match=r"timeout_s 0\.0 must be above 0"):
        ReplayOptions(timeout_s=0.0)


def test_a_trace_by_the_clock_of_its_source_begins_at_once() -> None:
    def answered(request: Request, listener: Listener) -> None:
        listener(Output(request.id, (1,), "length", at_s=time.perf_counter()))

    trace = offered(2)
    dated = replace(trace, requests=tuple(replace(r, arrival_s=1.7e9 + r.arrival_s) for r in trace.requests))
    assert len(replay(Scripted(answered), dated, prompts_for(dated)).records) == 2


@pytest.mark.slow
def test_ctrl_c_keeps_what_there_is_and_leaves_the_engine_nothing_to_do() -> None:
    out = in_fork(
        """
        import sys, threading, time, _thread
        sys.path.insert(0, TESTS)
        from support.serving.fake_engine import FakeEngine
        from elastic.bench.traces.prompts import random_prompts
        from elastic.bench.replay.open_loop import replay
        from elastic.bench.report.summary import summarize
        from elastic.bench.traces.trace import Trace, TraceRequest

        trace = Trace((TraceRequest(0.0, 2, 1), TraceRequest(0.01, 2, 10**6), TraceRequest(100.0, 2, 1)), "x")
        engine = FakeEngine(step_s=0.001, capacity=10**9)
        engine.start()
        threading.Timer(1.0, _thread.interrupt_main).start()
        run = replay(engine, trace, random_prompts(trace, 9))
        print(run.interrupted, [r.finish for r in run.records], bool(run.records[1].token_times_s))
        print(summarize(run)["elastic"]["unfinished"])
        engine.stop(drain=True, timeout_s=20)
        print(engine._thread.is_alive(), [t.name for t in threading.enumerate() if t.name.startswith("elastic")])
        """.replace("TESTS", repr(str(Path(__file__).parents[3])))
    )
    assert out.splitlines() == ["True ['length', 'unfinished'] True", "1", "False []"]


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.floats(0, 0.05), st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=30),
    st.integers(1, 6),
    st.sampled_from([None, 0, 2]),
)
@pytest.mark.slow
def test_every_offered_request_ends_exactly_once_in_one_way(
    wanted: list[tuple[float, int, int]], batch: int, queue: int | None
) -> None:
    trace = Trace(tuple(TraceRequest(*w) for w in sorted(wanted)), "made up")
    with serving(batch=batch, queue=queue) as engine:
        run = replay(engine, trace, prompts_for(trace), SLO(10.0), options=ReplayOptions(timeout_s=30))
    assert [r.arrival_s for r in run.records] == [r.arrival_s for r in trace.from_first_arrival().requests]
    assert {r.finish for r in run.records} <= {"length", "rejected"}
    for record, asked in zip(run.records, trace.requests, strict=True):
        assert record.output_tokens == (asked.output_tokens if record.completed else 0)
    check(run)


def check(run: ReplayRun) -> None:
    """What holds of any summary."""
    summary = summarize(run, detailed=True)
    assert summary["completed"] + summary["failed"] == summary["elastic"]["offered"] == len(run.records)
    assert summary["total_output_tokens"] == sum(summary["output_lens"])
    assert 0 <= summary["elastic"]["slo_attainment"] <= 1
    if summary["completed"]:
        assert summary["median_ttft_ms"] <= summary["p95_ttft_ms"] <= summary["p99_ttft_ms"] <= summary["max_ttft_ms"]


def test_a_recorder_hears_nothing_after_the_end() -> None:
    over = threading.Semaphore(0)
    recorder = Recorder("r", TraceRequest(0.0, 1, 2), 100.0, over)
    recorder.hear(Output("r", (5,), at_s=101.0))
    recorder.end("timeout", 102.0, "late")
    recorder.hear(Output("r", (6,), "length", at_s=103.0))
    recorder.end("failed", 104.0)
    recorder.piece(105.0)
    recorder.counted(7)
    record = recorder.record()
    assert record.output_tokens == 1
    assert (record.tokens, record.token_times_s, record.finish, record.ended_s) == ((5,), (1.0,), "timeout", 2.0)
    assert over.acquire(blocking=False)
    assert not over.acquire(blocking=False), "an end is told once"


def test_fixed_lengths_replay(capsys: pytest.CaptureFixture[str]) -> None:
    trace = generate(Poisson(200), Fixed(3, 2), 0.1)
    with serving() as engine:
        assert summarize(replay(engine, trace, prompts_for(trace)))["total_output_tokens"] == 2 * len(trace.requests)
    assert capsys.readouterr().err == "", "no terminal, no progress"
