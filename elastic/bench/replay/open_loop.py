"""Open-loop replay of a trace: requests come at their times in it, whatever has become of those before them."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

from elastic.bench.replay.progress import Progress, no_progress
from elastic.bench.replay.recorder import Recorder
from elastic.bench.replay.records import COMPLETED
from elastic.bench.replay.run import ReplayRun
from elastic.bench.replay.targets import InProcessTarget, LoadTarget
from elastic.bench.replay.timeline import StateSampler
from elastic.bench.traces.trace import Trace
from elastic.config import SLO
from elastic.engines.base import Engine
from elastic.errors import ConfigError, StateError

LEAD_S = 0.05
"""Seconds from the start of the threads to the trace's zero."""
TIMEOUT_CHECK_S = 0.05
"""Seconds between two checks for timeouts."""
LONGEST_S = 1e9
"""After 30 years nobody waits for a request."""
_replays = itertools.count()


@dataclass(frozen=True)
class ReplayOptions:
    """The settings of a replay."""

    warmup: int = 0
    """Requests before the run, one after the other, like the first of the trace in length; not recorded."""
    timeout_s: float | None = 600.0
    """Seconds from its arrival after which a request is cancelled. None: never."""
    sample_every_s: float = 0.25
    """Seconds between two samples of the state."""

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise ConfigError(f"warmup {self.warmup} must be at least 0")
        for name in ("timeout_s", "sample_every_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} {value} must be above 0 and finite")


def replay(
    engine: Engine | LoadTarget,
    trace: Trace,
    prompts: Sequence[tuple[int, ...]],
    slo: SLO | None = None,
    *,
    options: ReplayOptions | None = None,
    progress: Progress = no_progress,
) -> ReplayRun:
    """Offer the requests of a trace, each at its time, and record them; returns when all have ended.

    The first request of a trace without a window comes at once, whenever it did in its source (`Trace.offset_s`).
    `engine` is one that was started, or a `HTTPTarget`. `prompts` are the token ids of each request. A request
    counts as arrived at its time in the trace: a delay of the replay itself counts as waiting, and is reported
    (`lateness`). Ends of text are ignored: outputs are as long as the trace says.
    Ctrl-C ends the run: requests under way are cancelled, and the `ReplayRun` says `interrupted`.
    Raises `ConfigError` for prompts that do not fit the trace, and for arrivals too late to be waited for, `StateError`
    when a warm-up request fails.
    """
    if [len(p) for p in prompts] != [r.prompt_tokens for r in trace.requests]:
        raise ConfigError("prompts must have as many tokens each as the requests of the trace, in its order")
    trace = trace.from_first_arrival()
    last_s = max((request.arrival_s for request in trace.requests), default=0.0)
    if not last_s < LONGEST_S:
        raise ConfigError(
            f"a request of {trace.source} comes after {last_s:.3g} s; cut the trace before {LONGEST_S:g} s"
        )
    options = options or ReplayOptions()
    target: LoadTarget = engine if isinstance(engine, LoadTarget) else InProcessTarget(engine)
    warm_up(target, trace, prompts, options)
    return _Replay(target, trace, prompts, options).run(slo, progress)


def warm_up(target: LoadTarget, trace: Trace, prompts: Sequence[tuple[int, ...]], options: ReplayOptions) -> None:
    """Send requests of the lengths of the first ones, with prompts backwards, so that no cache knows the real ones."""
    for i, wanted in enumerate(trace.requests[: options.warmup]):
        over = threading.Semaphore(0)
        recorder = Recorder(f"warmup-{next(_replays)}-{i}", wanted, time.perf_counter() - wanted.arrival_s, over)
        target.submit(recorder.request(prompts[i][::-1]), recorder)
        if not over.acquire(timeout=options.timeout_s):
            target.cancel(recorder.name)
            raise StateError(f"a warm-up request was not answered within {options.timeout_s} s")
        record = recorder.record()
        if record.finish not in COMPLETED:
            raise StateError(f"a warm-up request ended as {record.finish}: {record.error or 'no reason given'}")


class _Replay:
    """One run: a thread that submits, a thread that samples, and the caller's, which waits."""

    def __init__(
        self, target: LoadTarget, trace: Trace, prompts: Sequence[tuple[int, ...]], options: ReplayOptions
    ) -> None:
        self._target = target
        self._trace = trace
        self._prompts = prompts
        self._options = options
        self._over = threading.Semaphore(0)
        self._stop = threading.Event()
        self._sampler = StateSampler(target.observe, options.sample_every_s)  # which may take seconds
        self._start_s = time.perf_counter() + LEAD_S
        self._submitted = 0
        number = next(_replays)
        self._recorders = [
            Recorder(f"replay-{number}-{i}", r, self._start_s, self._over) for i, r in enumerate(trace.requests)
        ]

    def run(self, slo: SLO | None, progress: Progress) -> ReplayRun:
        """Submit, wait and measure. Nothing goes on behind it, however it ends."""
        with self._sampler.running(self._start_s), ExitStack() as cancelling:
            try:
                interrupted = self._offer(progress)
            finally:
                end_s = time.perf_counter() - self._start_s
                for recorder in self._recorders:  # left over after an interrupt or a fault: the engine need not go on
                    if recorder.submitted and not recorder.ended:
                        recorder.end("unfinished", time.perf_counter(), "the replay was interrupted")
                        cancelling.callback(self._target.cancel, recorder.name)
        timeline, actions, weights = self._sampler.result()
        records = tuple(r.record() for r in self._recorders if r.submitted)
        return ReplayRun(self._trace, records, end_s, slo, weights, timeline, actions, interrupted)

    def _offer(self, progress: Progress) -> bool:
        """Submit all requests and wait for their ends; return whether Ctrl-C came before."""
        with ThreadPoolExecutor(1, "elastic-bench-submitter") as submitter:
            submitting = submitter.submit(self._submit_all)
            try:
                with progress(len(self._recorders)) as show:
                    for ended in self._wait(submitting):
                        show(ended, self._submitted)
            except KeyboardInterrupt:
                return True
            finally:
                self._stop.set()
        return False

    def _submit_all(self) -> None:
        for recorder, wanted, prompt in zip(self._recorders, self._trace.requests, self._prompts, strict=True):
            due_s = self._start_s + wanted.arrival_s
            if self._stop.wait(max(0.0, due_s - time.perf_counter())):
                return
            recorder.submitting(time.perf_counter())
            self._submitted += 1
            self._target.submit(recorder.request(prompt), recorder)

    def _wait(self, submitting: Future[None]) -> Iterator[int]:
        """Wait until all have ended; yield their number every now and then."""
        ended = 0
        while ended < len(self._recorders):
            ended += self._over.acquire(timeout=TIMEOUT_CHECK_S)
            while self._over.acquire(blocking=False):
                ended += 1
            self._cancel_late()
            if submitting.done():
                submitting.result()
            yield ended

    def _cancel_late(self) -> None:
        if self._options.timeout_s is None:
            return
        now_s = time.perf_counter()
        for recorder, wanted in zip(self._recorders, self._trace.requests, strict=True):
            deadline_s = self._start_s + wanted.arrival_s + self._options.timeout_s
            if now_s < deadline_s:
                return
            if recorder.submitted and not recorder.ended:
                recorder.end("timeout", now_s, f"not done after {self._options.timeout_s:g} s")
                self._target.cancel(recorder.name)
