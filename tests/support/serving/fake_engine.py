"""An engine without a model, for tests of what stands in front of one: the k-th token after a prompt is known."""

from __future__ import annotations

import threading
import time
from collections import deque

from elastic.controller.sensors.request_metrics import RequestMetrics
from elastic.engines.base import FinishReason, Listener, Output, Request
from elastic.errors import CapacityError, Overloaded, StateError


def token_after(prompt: tuple[int, ...], k: int, vocabulary: int = 256) -> int:
    """The k-th token that the fake engine generates after a prompt."""
    return (sum(prompt) + 7 * k) % vocabulary


class FakeEngine:
    """One token for every running request per step, on a thread of its own."""

    def __init__(
        self, *, step_s: float = 0.0, batch: int = 8, capacity: int = 10_000, queue: int | None = None
    ) -> None:
        self.counters = RequestMetrics()
        self.runtime = None
        self.weights: tuple[tuple[str, ...], ...] = (("float32",) * 2,)
        self.end_tokens: tuple[int, ...] = ()
        self.cancelled: list[str] = []
        self._step_s, self._batch, self._capacity, self._queue = step_s, batch, capacity, queue
        self._work = threading.Condition()
        self._waiting: deque[tuple[Request, Listener]] = deque()
        self._running: dict[str, tuple[Request, Listener, int]] = {}
        self._stop: str | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def serving(self) -> bool:
        return self._thread.is_alive() and not self._stop

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request, listener: Listener) -> None:
        with self._work:
            if not self.serving:
                raise StateError("the engine is not serving")
            needed = len(request.prompt) + request.max_tokens
            if needed > self._capacity:
                message = "the request never fits"
                raise CapacityError(message, requested_bytes=needed, free_bytes=0, total_bytes=self._capacity)
            if self._queue is not None and len(self._waiting) >= self._queue:
                self.counters.arrived(request.id, len(request.prompt), request.arrived_s)
                self.counters.ended(request.id, "rejected")
                raise Overloaded("too many requests wait", retry_after_s=1.0)
            self.counters.arrived(request.id, len(request.prompt), request.arrived_s)
            self._waiting.append((request, listener))
            self._work.notify_all()

    def cancel(self, request: str) -> None:
        with self._work:
            self.cancelled.append(request)
            self._work.notify_all()

    def stop(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        with self._work:
            self._stop = "drain" if drain else "now"
            self._work.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._work:
                self._work.wait_for(lambda: self._waiting or self._running or self._stop)
                if self._stop == "now":
                    self.cancelled += [r.id for r, _ in self._waiting] + list(self._running)
                self._drop_cancelled()
                if self._stop and not self._waiting and not self._running:
                    return
                while self._waiting and len(self._running) < self._batch:
                    request, listener = self._waiting.popleft()
                    self._running[request.id] = request, listener, 0
                    self.counters.scheduled(request.id)
            time.sleep(self._step_s)
            self._step()

    def _drop_cancelled(self) -> None:
        for request, listener in [x for x in self._waiting if x[0].id in self.cancelled]:
            self._waiting.remove((request, listener))
            self._end(request, listener, "cancelled")
        for name in [name for name in self._running if name in self.cancelled]:
            request, listener, _ = self._running.pop(name)
            self._end(request, listener, "cancelled")

    def _end(self, request: Request, listener: Listener, finish: FinishReason) -> None:
        self.counters.ended(request.id, "cancelled")
        listener(Output(request.id, (), finish, at_s=time.perf_counter()))

    def _step(self) -> None:
        for name, (request, listener, k) in list(self._running.items()):
            token = token_after(request.prompt, k)
            finish: FinishReason | None = "stop" if token in request.stop_tokens else None
            finish = finish or ("length" if k + 1 >= request.max_tokens else None)
            self._running[name] = request, listener, k + 1
            self.counters.produced(name)
            if finish:
                del self._running[name]
                self.counters.ended(name, "completed")
            listener(Output(name, (token,), finish, at_s=time.perf_counter()))
