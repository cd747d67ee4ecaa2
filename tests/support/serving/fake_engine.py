"""An engine without a model, for tests of what stands in front of one: the k-th token after a prompt is known."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastic.controller.sensors.request_metrics import RequestMetrics
from elastic.engines.base import FinishReason, Listener, Output, Request, TokenLogprobs
from elastic.errors import CapacityError, Overloaded, StateError

VOCABULARY = 256
ALWAYS = 100.0
"""A bias with which a token is always chosen."""


def token_after(prompt: tuple[int, ...], k: int, vocabulary: int = VOCABULARY, answer: int = 0) -> int:
    """The k-th token that the fake engine generates after a prompt, in one of its answers."""
    return (sum(prompt) + 7 * k + 13 * answer) % vocabulary


def logprobs_at(token: int, position: int, count: int, vocabulary: int = VOCABULARY) -> TokenLogprobs:
    """What the fake engine reports of a token: it is the likeliest but at each third position, there the second."""
    rank = 2 if position % 3 == 2 else 1
    order = [(token + 1 + i) % vocabulary for i in range(count + 1)]
    order.insert(rank - 1, token)
    top = tuple((each, -0.125 * (1 + i + position % 4)) for i, each in enumerate(order))
    return TokenLogprobs(token, top[rank - 1][1], rank, top[:count])


@dataclass
class _Answer:
    request: Request
    index: int
    listener: Listener
    tokens: int = 0


class FakeEngine:
    """One token for every answer of the running requests per step, on a thread of its own."""

    def __init__(
        self,
        *,
        step_s: float = 0.0,
        batch: int = 8,
        capacity: int = 10_000,
        queue: int | None = None,
        script: Callable[[Request], Sequence[int] | None] | None = None,
    ) -> None:
        """`script` says the tokens of the answers to a request, up to its end; None: the known ones."""
        self.counters = RequestMetrics()
        self.runtime = None
        self.weights: tuple[tuple[str, ...], ...] = (("float32",) * 2,)
        self.end_tokens: tuple[int, ...] = ()
        self.limit: int | None = None
        """Tokens that it takes of a request now; None: its capacity."""
        self.cancelled: list[str] = []
        self.cancelled_answers: list[tuple[str, int]] = []
        self.requests: list[Request] = []
        """All that were ever submitted."""
        self._step_s, self._batch, self._capacity, self._queue = step_s, batch, capacity, queue
        self._script = script
        self._work = threading.Condition()
        self._waiting: deque[tuple[Request, Listener]] = deque()
        self._running: dict[str, list[_Answer]] = {}
        """Answers that have not ended."""
        self._seen: set[tuple[int, ...]] = set()
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
            others = [w for w, _ in self._waiting if request.parent is None or w.parent != request.parent]
            if self._queue is not None and len(others) >= self._queue:
                self.counters.refused()
                raise Overloaded("too many requests wait", retry_after_s=1.0)
            self.counters.arrived(request.id, len(request.prompt), request.arrived_s, sequences=request.n)
            self.requests.append(request)
            self._waiting.append((request, listener))
            self._work.notify_all()

    def longest_request(self, most: int, *, ever: bool = False) -> int:
        return min(most, self._capacity if ever or self.limit is None else self.limit)

    def cancel(self, request: str, index: int | None = None) -> None:
        with self._work:
            if index is None:
                self.cancelled.append(request)
            else:
                self.cancelled_answers.append((request, index))
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
                    self._running[request.id] = [_Answer(request, i, listener) for i in range(request.n)]
                    self.counters.scheduled(request.id)
            time.sleep(self._step_s)
            self.counters.stepped(sum(map(len, self._running.values())))
            for name in list(self._running):
                for answer in list(self._running[name]):
                    self._step(answer)

    def _drop_cancelled(self) -> None:
        for request, listener in [x for x in self._waiting if x[0].id in self.cancelled]:
            self._waiting.remove((request, listener))
            self._running[request.id] = [_Answer(request, i, listener) for i in range(request.n)]
        for name, answers in list(self._running.items()):
            for answer in list(answers):
                if name in self.cancelled or (name, answer.index) in self.cancelled_answers:
                    self._end(answer, Output(name, (), "cancelled", at_s=time.perf_counter(), index=answer.index))

    def _end(self, answer: _Answer, output: Output) -> None:
        answers = self._running[output.request]
        answers.remove(answer)
        if not answers:
            del self._running[output.request]
            self.counters.ended(output.request, "cancelled" if output.finish == "cancelled" else "completed")
        answer.listener(output)

    def _step(self, answer: _Answer) -> None:
        request, k = answer.request, answer.tokens
        token = self._token(answer)
        may_end = k >= request.min_tokens
        finish: FinishReason | None = "stop" if may_end and token in request.stop_tokens else None
        finish = finish or ("length" if k + 1 >= request.max_tokens else None)
        answer.tokens += 1
        self.counters.produced(request.id)
        now_s, first = time.perf_counter(), k == 0
        position = len(request.prompt) + k
        output = Output(
            request.id,
            (token,),
            finish,
            at_s=now_s,
            index=answer.index,
            scheduled_s=now_s if first else None,
            logprobs=() if request.logprobs is None else (logprobs_at(token, position, request.logprobs),),
            prompt_logprobs=self._of_prompt(request) if first and answer.index == 0 else None,
            cached_tokens=self._cached(request) if first else None,
        )
        if finish:
            self._end(answer, output)
        else:
            answer.listener(output)

    def _token(self, answer: _Answer) -> int:
        request, k = answer.request, answer.tokens
        always = [token for token, bias in request.sampling.logit_bias if bias >= ALWAYS]
        scripted = self._script(request) if self._script else None
        if always:
            return always[0]
        if scripted is not None:
            return scripted[k] if k < len(scripted) else request.stop_tokens[0]
        token = token_after(request.prompt, k, answer=answer.index)
        while k < request.min_tokens and token in request.stop_tokens:
            token = (token + 1) % VOCABULARY
        return token

    def _of_prompt(self, request: Request) -> tuple[TokenLogprobs | None, ...] | None:
        if request.prompt_logprobs is None:
            return None
        known = (logprobs_at(token, i, request.prompt_logprobs) for i, token in enumerate(request.prompt))
        return tuple(entry if i else None for i, entry in enumerate(known))

    def _cached(self, request: Request) -> int:
        """All but the last token of a prompt that was there before."""
        cached = len(request.prompt) - 1 if request.prompt in self._seen else 0
        self._seen.add(request.prompt)
        return cached
