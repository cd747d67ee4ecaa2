"""The bridge from the engine's thread to the event loop: the answers to one HTTP request, and their cancellation.

The engine's listener only appends to a queue and wakes the event loop once for all that came since. Tokens that a
client has not read yet wait as ids, never as text: at most `max_tokens` small integers for each answer. So a client
that does not read costs little and holds up nobody: its request runs to its end and frees its KV.

`Engine.submit` and `Engine.cancel` are called on the event loop and must return soon.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from elastic.engines.base import Engine, Output, Request
from elastic.server.generation.detokenizer import Detokenizer, StopStrings
from elastic.server.generation.errors import APIError, unavailable

Ended = Literal["stop", "length"]
_AT_ONCE = 256
"""Tokens made text before the event loop has another turn."""


class LoopQueue:
    """A queue of news from any thread to one event loop, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._news: deque[tuple[Callable[[Output], None], Output]] = deque()
        self._woken = False

    def put(self, take: Callable[[Output], None], output: Output) -> None:
        """Have `take(output)` called on the loop. Called on any thread; never waits, never raises."""
        self._news.append((take, output))
        if not self._woken:  # `_deliver` clears it before it empties the queue: nothing stays behind
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False
        while self._news:
            take, output = self._news.popleft()
            take(output)


@dataclass(frozen=True)
class TextDelta:
    """More of one answer."""

    index: int
    """The number of the prompt that it answers."""
    text: str
    finish: Ended | None = None


class ChoiceStream:
    """One request of the engine, seen from the event loop."""

    def __init__(self, index: int, request: Request, tokenizer: Any, stops: Sequence[str]) -> None:
        self.index, self.request = index, request
        self.submitted = False
        self.last: Output | None = None
        """The news that it has ended."""
        self.first_s: float | None = None
        self.tokens = 0
        """Generated, as far as they were read; after a stop string, those up to its end."""
        self.generated = 0
        """Generated, as far as the engine has said."""
        self.unread: list[int] = []
        """Tokens to read."""
        self.read_to_end = False
        self._text, self._stops = Detokenizer(tokenizer, request.prompt), StopStrings(stops)

    @property
    def complete(self) -> bool:
        """True when the client got all that it asked for."""
        return self._stops.found or (self.last is not None and self.last.finish in ("stop", "length"))

    def take(self, output: Output) -> None:
        """Take news from the engine."""
        self.unread += output.tokens
        self.generated += len(output.tokens)
        if output.tokens and self.first_s is None:
            self.first_s = output.at_s or time.perf_counter()
        if output.finish:
            self.last = output

    def read(self) -> TextDelta | None:
        """Return what is new, if anything. Raises `APIError` if the engine gave up on the request."""
        if self.read_to_end:
            return None
        text = self._read_text()
        finish: Ended | None = None
        if self._stops.found:
            finish = "stop"
        elif self.last and not self.unread:
            finish = _reason(self.last)
            text += self._stops.push(self._text.flush())
            text += self._stops.flush()
            finish = "stop" if self._stops.found else finish
        self.read_to_end = finish is not None
        return TextDelta(self.index, text, finish) if text or finish else None

    def _read_text(self) -> str:
        """Make text of the next unread tokens, up to a stop string or a token that only ends the answer."""
        tokens, self.unread = self.unread[:_AT_ONCE], self.unread[_AT_ONCE:]
        text = ""
        for token in tokens:
            self.tokens += 1
            if token in self.request.stop_tokens:
                break
            text += self._stops.push(self._text.push((token,)))
            if self._stops.found:
                break
        return text


def _reason(last: Output) -> Ended:
    """Return the reason that a request ended for. Raises `APIError` if it was not completed."""
    if last.finish in ("stop", "length"):
        return last.finish
    if last.finish == "cancelled":
        raise unavailable("the request was cancelled: the server is shutting down")
    raise APIError(500, f"the request failed: {last.error or 'the engine gave no reason'}", code="engine_error")


class ResponseStream:
    """All answers to one HTTP request. Made on the event loop; `close` it in any case.

    An eager one has deltas as tokens come, others at the end of each answer: enough where nobody reads before that.
    """

    def __init__(
        self,
        engine: Engine,
        answers: Sequence[ChoiceStream],
        queue: LoopQueue,
        on_end: Callable[[ChoiceStream], None],
        tokens: Counter[int],
        *,
        eager: bool,
    ) -> None:
        """`tokens` counts those generated, by the index of their weights in `Engine.weights`."""
        self.answers = tuple(answers)
        self._engine, self._queue, self._on_end, self._tokens = engine, queue, on_end, tokens
        self._eager = eager
        self._news = asyncio.Event()
        self._closed = False

    def submit(self) -> None:
        """Give all requests to the engine, or none: raises what the engine raises."""
        try:
            for answer in self.answers:
                self._engine.submit(answer.request, self._listener(answer))
                answer.submitted = True
        except BaseException:
            self.close()
            raise

    def _listener(self, answer: ChoiceStream) -> Callable[[Output], None]:
        """Return the engine's listener for an answer: it only queues the news, for the event loop to take."""

        def take(output: Output) -> None:
            answer.take(output)
            self._tokens[output.weights] += len(output.tokens)
            if output.finish:
                self._on_end(answer)
            if self._eager or output.finish:
                self._news.set()

        return partial(self._queue.put, take)

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        """Yield the answers, delta by delta, until all are complete. Raises `APIError`."""
        while not all(answer.read_to_end for answer in self.answers):
            await self._news.wait()
            self._news.clear()
            if self._closed:
                raise APIError(499, "the client is gone", code="client_closed_request")
            for answer in self.answers:
                if delta := answer.read():
                    if delta.finish:
                        if answer.last is None:  # after a stop string, the engine does not know yet
                            self._engine.counters.ended(answer.request.id, "completed")
                        self._cancel(answer)
                    yield delta
            if any(answer.unread for answer in self.answers):
                self._news.set()
                await asyncio.sleep(0)  # others have their turn

    async def whole(self) -> list[TextDelta]:
        """Return the answers when all are complete. Raises `APIError`."""
        answers = [TextDelta(answer.index, "") for answer in self.answers]
        async for delta in self.deltas():
            answers[delta.index] = TextDelta(delta.index, answers[delta.index].text + delta.text, delta.finish)
        return answers

    def close(self) -> None:
        """Cancel the requests that still run. Can be called twice."""
        self._closed = True
        self._news.set()
        for answer in self.answers:
            self._cancel(answer)

    def _cancel(self, answer: ChoiceStream) -> None:
        if answer.submitted and answer.last is None:
            answer.submitted = False  # once is enough
            self._engine.cancel(answer.request.id)

    @contextlib.asynccontextmanager
    async def while_connected(self, receive: Callable[[], Any]) -> AsyncIterator[None]:
        """Close the stream when the client disconnects, or when this ends."""

        async def close_when_gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.close()

        watch = asyncio.ensure_future(close_when_gone())
        try:
            yield
        finally:
            watch.cancel()
            self.close()
