"""A recorder of one request, fed from any thread."""

from __future__ import annotations

import threading
import time

from elastic.bench.replay.records import Finish, Record
from elastic.bench.traces.trace import TraceRequest
from elastic.engines.base import Output, Request


class Recorder:
    """The times and tokens of one request until it ends; what comes later is ignored. Thread-safe."""

    def __init__(self, name: str, wanted: TraceRequest, start_s: float, over: threading.Semaphore) -> None:
        self.name = name
        self.submitted = self.ended = False
        self._wanted = wanted
        self._start_s = start_s
        self._over = over
        self._lock = threading.Lock()
        self._submitted_s: float | None = None
        self._scheduled_s: float | None = None
        self._waited_for_kv_s: float | None = None
        self._times: list[float] = []
        self._tokens: list[int] = []
        self._weights: list[int] = []
        self._reported: int | None = None
        self._finish: Finish | None = None
        self._ended_s: float | None = None
        self._error: str | None = None

    def request(self, prompt: tuple[int, ...]) -> Request:
        """Make the request to submit, which arrived at its time in the trace."""
        arrived_s = self._start_s + self._wanted.arrival_s
        return Request(prompt, self._wanted.output_tokens, ignore_eos=True, arrived_s=arrived_s, id=self.name)

    def submitting(self, now_s: float) -> None:
        """Record the submission."""
        with self._lock:
            self.submitted = True
            self._submitted_s = now_s - self._start_s

    def hear(self, output: Output) -> None:
        """Record an output of an engine, as its listener."""
        with self._lock:
            if self.ended:
                return
            at_s = (output.at_s or time.perf_counter()) - self._start_s
            if output.scheduled_s is not None:
                self._scheduled_s = output.scheduled_s - self._start_s
                queued_s = self._scheduled_s - self._wanted.arrival_s
                waited_s = output.waited_for_kv_s  # to a step: the shortage may have begun before the request came
                self._waited_for_kv_s = None if waited_s is None else min(waited_s, queued_s)
            self._times += [at_s] * len(output.tokens)
            self._tokens += output.tokens
            self._weights += [output.weights] * len(output.tokens)
            if output.finish is not None:
                self._end(output.finish, at_s, output.error)

    def piece(self, now_s: float) -> None:
        """Record a piece of a stream: a token, usually."""
        with self._lock:
            if not self.ended:
                self._times.append(now_s - self._start_s)

    def counted(self, output_tokens: int) -> None:
        """Record a server's count of all tokens."""
        with self._lock:
            if not self.ended:
                self._reported = output_tokens

    def end(self, finish: Finish, now_s: float, error: str | None = None) -> None:
        """Record the end, unless there was one already."""
        with self._lock:
            if not self.ended:
                self._end(finish, now_s - self._start_s, error)

    def record(self) -> Record:
        """Return the record so far; `unfinished` if the request did not end."""
        with self._lock:
            return Record(
                self.name,
                self._wanted.arrival_s,
                self._wanted.prompt_tokens,
                self._wanted.output_tokens,
                self._submitted_s,
                self._scheduled_s,
                self._waited_for_kv_s,
                tuple(self._times),
                len(self._times) if self._reported is None else self._reported,
                self._finish or "unfinished",
                self._ended_s,
                self._error,
                tuple(self._weights),
                tuple(self._tokens),
            )

    def _end(self, finish: Finish, at_s: float, error: str | None) -> None:
        self._finish, self._ended_s, self._error, self.ended = finish, at_s, error, True
        self._over.release()
