"""Taking down what is heard of a request, from whichever thread says it."""

from __future__ import annotations

import threading
import time

from elastic.bench.replay.records import Finish, Record
from elastic.bench.traces.trace import TraceRequest
from elastic.engines.base import Output, Request


class Recorder:
    """Everything about one request until it ends; what comes later is ignored. Thread-safe."""

    def __init__(self, name: str, wanted: TraceRequest, start_s: float, over: threading.Semaphore) -> None:
        self.name = name
        self.submitted = False
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

    @property
    def ended(self) -> bool:
        return self._finish is not None

    def request(self, prompt: tuple[int, ...]) -> Request:
        """What is submitted: arrived when the trace says so."""
        arrived_s = self._start_s + self._wanted.arrival_s
        most = self._wanted.output_tokens
        return Request(prompt, most, ignore_eos=True, arrived_s=arrived_s, id=self.name)

    def submitting(self, now_s: float) -> None:
        with self._lock:
            self.submitted = True
            self._submitted_s = now_s - self._start_s

    def hear(self, output: Output) -> None:
        """The listener of an engine."""
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
        """A piece of a stream came: a token, usually."""
        with self._lock:
            if not self.ended:
                self._times.append(now_s - self._start_s)

    def counted(self, output_tokens: int) -> None:
        """A server says how many tokens there were in all."""
        with self._lock:
            self._reported = output_tokens

    def end(self, finish: Finish, now_s: float, error: str | None = None) -> None:
        """It is over, unless it was already."""
        with self._lock:
            if not self.ended:
                self._end(finish, now_s - self._start_s, error)

    def record(self) -> Record:
        """What there is; `unfinished` if it did not end."""
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
        self._finish, self._ended_s, self._error = finish, at_s, error
        self._over.release()
