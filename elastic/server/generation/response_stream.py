"""The bridge from the engine's thread to the event loop: the answers to one HTTP request, and their cancellation.

The engine's listener only appends to a queue and wakes the event loop once for all that came since. Tokens that a
client has not read yet wait as ids, never as text: at most `max_tokens` small integers for each answer, with the
log-probabilities that were asked for. A client that does not read holds up nobody: its request runs to its end and
frees its KV.

`Engine.submit` and `Engine.cancel` are called on the event loop and must return soon.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, zip_longest
from typing import Any, Literal, NamedTuple

from elastic.engines.base import Engine, Output, Request, TokenLogprobs
from elastic.server.generation.detokenizer import Detokenizer, StopStrings
from elastic.server.protocol.errors import APIError, unavailable

Ended = Literal["stop", "length"]
_AT_ONCE = 64
"""Tokens of all answers that are made text, or deltas without any, before the event loop has another turn."""


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


class ReadToken(NamedTuple):
    """A token of an answer, as it is reported."""

    id: int
    offset: int
    """Characters of the answer before it."""
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class TextDelta:
    """More of one answer."""

    index: int
    """The number of the answer: prompts in order, the answers of each in order."""
    text: str
    finish: Ended | None = None
    tokens: tuple[ReadToken, ...] = ()
    """Those that were read for it, where they are reported."""
    stop_reason: str | int | None = None
    """The stop string or the asked-for stop token that ended it."""


@dataclass(frozen=True)
class AnswerOptions:
    """How tokens become the text of an answer."""

    stops: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    """Those that were asked for: the one that ends an answer is told."""
    keep_stop: bool = False
    """The stop string or stop token that ends an answer is part of its text."""
    skip_special: bool = True
    report_tokens: bool = False
    generate: bool = True
    """False: nothing but the prompt is asked for; the one token that an engine generates at least is dropped."""


class ChoiceStream:
    """One answer of a request of the engine, seen from the event loop."""

    def __init__(
        self, index: int, request: Request, tokenizer: Any, options: AnswerOptions, first: ChoiceStream | None = None
    ) -> None:
        """`first` is the first answer of the same request; None: this is it."""
        self.index, self.request = index, request
        self.first = self if first is None else first
        self.last: Output | None = None
        """The news that it has ended."""
        self.scheduled_s: float | None = None
        self.first_s: float | None = None
        self.last_s: float | None = None
        """When its first and its last tokens were there."""
        self.tokens = 0
        """Generated, as far as they were read; after a stop string, those up to its end."""
        self.generated = 0
        """Generated, as far as the engine has said."""
        self.cached_tokens: int | None = None
        """Of the prompt: those whose KV blocks were there already."""
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        """Of the prompt's tokens, in the first answer to it."""
        self.unread: deque[tuple[int, TokenLogprobs | None]] = deque()
        """Tokens to read."""
        self.read_to_end = False
        self._options = options
        self._text = Detokenizer(tokenizer, request.prompt, skip_special=options.skip_special)
        self._length = 0
        self._stops = StopStrings(options.stops, keep=options.keep_stop)
        self._stop_token: int | None = None

    @property
    def complete(self) -> bool:
        """True when the client got all that it asked for."""
        return self._stops.found is not None or (self.last is not None and self.last.finish in ("stop", "length"))

    def take(self, output: Output) -> float | None:
        """Take news from the engine, on the event loop; return the seconds since the tokens before, if there were."""
        self.generated += len(output.tokens)
        before_s = self.last_s
        if output.tokens:
            self.last_s = output.at_s or time.perf_counter()
        if self._options.generate:
            self.unread.extend(zip_longest(output.tokens, output.logprobs))
        if output.tokens and self.first_s is None:
            self.first_s, self.scheduled_s = self.last_s, output.scheduled_s
        if output.cached_tokens is not None:
            self.cached_tokens = output.cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.finish:
            self.last = output
        return None if before_s is None or self.last_s is None or not output.tokens else self.last_s - before_s

    def read(self, most: int) -> TextDelta | None:
        """Return what is new, of so many tokens at most. Raises `APIError` if the engine gave up on the request."""
        if self.read_to_end or self._awaits_prompt_logprobs:
            return None
        text, tokens = self._read_tokens(most)
        finish: Ended | None = None
        if self._stops.found is not None:
            finish = "stop"
        elif self.last and not self.unread:
            finish = _reason(self.last)
            text += self._stops.push(self._text.flush())
            text += self._stops.flush()
            finish = "stop" if self._stops.found is not None else finish if self._options.generate else "length"
        self.read_to_end = finish is not None
        if not (text or tokens or finish):
            return None
        stop_reason = (self._stops.found if self._stops.found is not None else self._stop_token) if finish else None
        return TextDelta(self.index, text, finish, tuple(tokens), stop_reason)

    @property
    def _awaits_prompt_logprobs(self) -> bool:
        """True while what comes before the answer is not there; the first answer to the prompt brings it."""
        failed = self.last is not None and self.last.finish not in ("stop", "length")
        comes = self.first.prompt_logprobs is None and self.first.last is None
        return self.request.prompt_logprobs is not None and comes and not failed

    def _read_tokens(self, most: int) -> tuple[str, list[ReadToken]]:
        """Make text of the next unread tokens, up to a stop string or a token that only ends the answer."""
        text, tokens = "", []
        for _ in range(min(len(self.unread), most)):
            token, logprobs = self.unread.popleft()
            self.tokens += 1
            if self._options.report_tokens:
                tokens.append(ReadToken(token, self._length, logprobs))
            ends = token in self.request.stop_tokens and self.tokens > self.request.min_tokens
            if ends and token in self._options.stop_tokens:
                self._stop_token = token
            if not ends or self._options.keep_stop:
                piece = self._text.push((token,))
                self._length += len(piece)
                text += piece if self.tokens <= self.request.min_tokens else self._stops.push(piece)
            if ends or self._stops.found is not None:
                self.unread.clear()
                break
        return text, tokens


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
        on_tokens: Callable[[Output, float | None], None],
        *,
        eager: bool,
    ) -> None:
        """`answers` has those of a request one after the other.

        `on_tokens` is told each output, and the seconds since the tokens before of the same answer.
        """
        self.answers = tuple(answers)
        self._engine, self._queue, self._on_end, self._on_tokens = engine, queue, on_end, on_tokens
        self._eager = eager
        self._submitted: dict[str, list[ChoiceStream]] = {}
        """Requests of the engine that may still run, and their answers."""
        self._news = asyncio.Event()
        self._closed = False

    def submit(self) -> None:
        """Give all requests to the engine, or none: raises what the engine raises."""
        try:
            for name, group in groupby(self.answers, key=lambda answer: answer.request.id):
                answers = list(group)
                self._engine.submit(answers[0].request, self._listener(answers))
                self._submitted[name] = answers
        except BaseException:
            self.close()
            raise

    def _listener(self, answers: Sequence[ChoiceStream]) -> Callable[[Output], None]:
        """Return the engine's listener for a request: it only queues the news, for the event loop to take."""

        def take(output: Output) -> None:
            answer = answers[output.index]
            self._on_tokens(output, answer.take(output))
            if output.finish:
                self._on_end(answer)
            if self._eager or output.finish:
                self._news.set()

        return partial(self._queue.put, take)

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        """Yield the answers, delta by delta, until all are complete. Raises `APIError`."""
        left = _AT_ONCE
        while not all(answer.read_to_end for answer in self.answers):
            await self._news.wait()
            self._news.clear()
            for answer in self.answers:
                if self._closed:
                    raise APIError(499, "the client is gone", code="client_closed_request")
                before, delta = answer.tokens, answer.read(left)
                left -= max(answer.tokens - before, int(delta is not None))
                if delta is not None:
                    if delta.finish and answer.last is None:  # after a stop string, the engine does not know yet
                        self._end(answer)
                    yield delta
                if left <= 0:
                    if answer.unread:
                        self._news.set()
                    await asyncio.sleep(0)  # others have their turn
                    left = _AT_ONCE

    async def whole(self) -> list[TextDelta]:
        """Return the answers when all are complete. Raises `APIError`."""
        answers = [TextDelta(answer.index, "") for answer in self.answers]
        async for delta in self.deltas():
            before = answers[delta.index]
            answers[delta.index] = replace(delta, text=before.text + delta.text, tokens=before.tokens + delta.tokens)
        return answers

    def close(self) -> None:
        """Cancel the requests that still run. Can be called twice."""
        self._closed = True
        self._news.set()
        while self._submitted:
            name, answers = self._submitted.popitem()
            if any(answer.last is None and not answer.read_to_end for answer in answers):
                self._engine.cancel(name)

    def _end(self, answer: ChoiceStream) -> None:
        """End an answer that is complete before the engine ends it; its request counts as completed with the last."""
        name = answer.request.id
        answers = self._submitted.get(name, ())
        if any(other.last is None and not other.read_to_end for other in answers):
            self._engine.cancel(name, answers.index(answer))
            return
        self._engine.counters.ended(name, "completed")
        self._engine.cancel(name)
        self._submitted.pop(name, None)

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
