"""The endpoints of OpenAI's API, in its shapes: completions, chat completions, models."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HTTPRequest
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from elastic.engines.base import Request
from elastic.errors import ElasticError
from elastic.server.generation.bodies import JSONRoute
from elastic.server.generation.errors import APIError, in_words
from elastic.server.generation.metrics import Operation
from elastic.server.generation.response_stream import ChoiceStream, ResponseStream, TextDelta
from elastic.server.generation.schemas import ChatBody, CompletionBody, SamplingBody
from elastic.server.generation.state import ServerState

JSON = dict[str, Any]


class Chat:
    """The shapes of `/v1/chat/completions`."""

    operation: Operation = "chat"
    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    @staticmethod
    def choice(index: int, text: str, finish: str | None) -> JSON:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish}

    @staticmethod
    def opening(index: int) -> list[JSON]:
        """What comes before an answer's first piece."""
        return [Chat._delta(index, {"role": "assistant", "content": ""}, None)]

    @staticmethod
    def more(piece: TextDelta) -> list[JSON]:
        """What a piece is in a stream."""
        text = [Chat._delta(piece.index, {"content": piece.text}, None)] if piece.text else []
        return text + ([Chat._delta(piece.index, {}, piece.finish)] if piece.finish else [])

    @staticmethod
    def _delta(index: int, delta: JSON, finish: str | None) -> JSON:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}


class Completion:
    """The shapes of `/v1/completions`."""

    operation: Operation = "text_completion"
    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    @staticmethod
    def choice(index: int, text: str, finish: str | None) -> JSON:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}

    @staticmethod
    def opening(index: int) -> list[JSON]:
        return []

    @staticmethod
    def more(piece: TextDelta) -> list[JSON]:
        return [Completion.choice(piece.index, piece.text, piece.finish)]


Shapes = type[Chat] | type[Completion]


def routes(serving: ServerState) -> APIRouter:
    """The endpoints."""
    router = APIRouter(route_class=JSONRoute)

    @router.post("/v1/completions")
    async def completions(body: CompletionBody, http: HTTPRequest) -> Response:
        arrived_s = time.perf_counter()
        _check(body, serving)
        return await _answer(serving, Completion, body, await serving.prompts.completion(body, arrived_s), http)

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, http: HTTPRequest) -> Response:
        arrived_s = time.perf_counter()
        _check(body, serving)
        return await _answer(serving, Chat, body, await serving.prompts.chat(body, arrived_s), http)

    @router.get("/v1/models")
    async def models() -> JSON:
        return {"object": "list", "data": [_card(serving)]}

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> JSON:
        _check_model(model, serving)
        return _card(serving)

    return router


def _card(serving: ServerState) -> JSON:
    card = {"id": serving.name, "object": "model", "created": int(serving.since_s), "owned_by": "elastic"}
    return {**card, "max_model_len": serving.max_model_len}


def _check(body: SamplingBody, serving: ServerState) -> None:
    if body.model is not None:
        _check_model(body.model, serving)
    body.check()


def _check_model(name: str, serving: ServerState) -> None:
    if name != serving.name:
        message = f"the model {name[:200]!r} does not exist here; there is {serving.name!r}"
        raise APIError(404, message, param="model", code="model_not_found")


async def _answer(
    serving: ServerState, shapes: Shapes, body: SamplingBody, requests: Sequence[Request], http: HTTPRequest
) -> Response:
    job = serving.job(requests, body.stops, shapes.operation, stream=bool(body.stream))
    job.submit()
    envelope = {"id": f"{shapes.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": serving.name}
    if body.stream:
        return EventStream(job, _chunks(job, shapes, envelope, body))
    async with job.while_connected(http.receive):
        texts = [""] * len(job.answers)
        finishes = [""] * len(job.answers)
        async for piece in job.pieces():  # to its end, or an error of its own
            texts[piece.index] += piece.text
            finishes[piece.index] = piece.finish or ""
    choices = [shapes.choice(i, text, finish) for i, (text, finish) in enumerate(zip(texts, finishes, strict=True))]
    return JSONResponse({**envelope, "object": shapes.whole, "choices": choices, "usage": usage(job.answers)})


async def _chunks(
    job: ResponseStream, shapes: Shapes, envelope: JSON, body: SamplingBody
) -> AsyncGenerator[list[JSON], None]:
    """The objects of a stream; those of one list are sent together.

    An answer is opened by its first piece, not before: what a client measures up to there is its first token.
    """
    envelope = {**envelope, "object": shapes.chunk, **({"usage": None} if body.wants_usage else {})}
    unopened = {answer.index for answer in job.answers}
    async with aclosing(job.pieces()) as pieces:
        async for piece in pieces:
            choices = (shapes.opening(piece.index) if piece.index in unopened else []) + shapes.more(piece)
            unopened.discard(piece.index)
            so_far = {"usage": usage([job.answers[piece.index]])} if body.wants_usage_always else {}
            yield [{**envelope, "choices": [choice], **so_far} for choice in choices]
    if body.wants_usage:
        yield [{**envelope, "choices": [], "usage": usage(job.answers)}]


def usage(answers: Sequence[ChoiceStream]) -> JSON:
    """Tokens that were read and generated; after a stop string, those up to where it ended."""
    prompt, generated = sum(len(a.request.prompt) for a in answers), sum(a.tokens for a in answers)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


class EventStream(StreamingResponse):
    """Server-sent events, each `data: JSON`, the last `data: [DONE]`; before it, where something failed, an error.

    The job is cancelled when the client disconnects, or when sending fails.
    """

    def __init__(self, job: ResponseStream, objects: AsyncGenerator[list[JSON], None]) -> None:
        self._job = job
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        self._events = _events(objects)
        super().__init__(self._events, media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._job.while_connected(receive), aclosing(self._events):
            with suppress(OSError):  # the client is gone
                await self.stream_response(send)


async def _events(objects: AsyncGenerator[list[JSON], None]) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(objects):
            async for found in objects:
                yield b"".join(map(_event, found))
    except APIError as error:
        yield _event(error.body())
    except ElasticError as error:
        yield _event(in_words(error).body())
    yield b"data: [DONE]\n\n"


def _event(found: JSON) -> bytes:
    return b"data: " + json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
