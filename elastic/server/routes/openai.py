"""The endpoints of OpenAI's API, in its formats: completions, chat completions, models."""

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
from elastic.server.generation.errors import APIError, as_api_error
from elastic.server.generation.metrics import Operation
from elastic.server.generation.response_stream import ChoiceStream, ResponseStream, TextDelta
from elastic.server.generation.schemas import ChatBody, CompletionBody, SamplingBody, StreamOptions
from elastic.server.generation.state import ServerState

JSON = dict[str, Any]


class Chat:
    """The JSON of `/v1/chat/completions`."""

    operation: Operation = "chat"
    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    @staticmethod
    def choice(index: int, text: str, finish: str | None) -> JSON:
        """Return one whole answer."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish}

    @staticmethod
    def chunks(delta: TextDelta, first: bool) -> list[JSON]:
        """Return more of an answer, as choices of a stream; the first begin with the role."""
        changes: list[tuple[JSON, str | None]] = [({"role": "assistant", "content": ""}, None)] if first else []
        changes += [({"content": delta.text}, None)] if delta.text else []
        changes += [({}, delta.finish)] if delta.finish else []
        return [
            {"index": delta.index, "delta": change, "logprobs": None, "finish_reason": finish}
            for change, finish in changes
        ]


class Completion:
    """The JSON of `/v1/completions`."""

    operation: Operation = "text_completion"
    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    @staticmethod
    def choice(index: int, text: str, finish: str | None) -> JSON:
        """Return one whole answer, or more of it."""
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}

    @staticmethod
    def chunks(delta: TextDelta, first: bool) -> list[JSON]:
        """Return more of an answer, as choices of a stream."""
        return [Completion.choice(delta.index, delta.text, delta.finish)]


Format = type[Chat] | type[Completion]


def routes(serving: ServerState) -> APIRouter:
    """Make the endpoints."""
    router = APIRouter(route_class=JSONRoute)

    @router.post("/v1/completions")
    async def completions(body: CompletionBody, http: HTTPRequest) -> Response:
        arrived_s = time.perf_counter()
        _check_model(body.model, serving)
        body.check()
        return await _answer(serving, Completion, body, await serving.prompts.completion(body, arrived_s), http)

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, http: HTTPRequest) -> Response:
        arrived_s = time.perf_counter()
        _check_model(body.model, serving)
        body.check()
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


def _check_model(name: str | None, serving: ServerState) -> None:
    """Raise `APIError` unless the model is the one that is served; None is that one too."""
    if name is not None and name != serving.name:
        message = f"the model {name[:200]!r} does not exist here; there is {serving.name!r}"
        raise APIError(404, message, param="model", code="model_not_found")


async def _answer(
    serving: ServerState, form: Format, body: SamplingBody, requests: Sequence[Request], http: HTTPRequest
) -> Response:
    """Answer with a stream, or when all answers are complete."""
    stream = serving.respond(requests, body.stops, form.operation, eager=bool(body.stream or body.stops))
    stream.submit()
    envelope = {"id": f"{form.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": serving.name}
    if body.stream:
        return EventStream(stream, _chunks(stream, form, envelope, body))
    async with stream.while_connected(http.receive):
        answers = await stream.whole()
    choices = [form.choice(answer.index, answer.text, answer.finish) for answer in answers]
    return JSONResponse({**envelope, "object": form.whole, "choices": choices, "usage": usage(stream.answers)})


async def _chunks(
    stream: ResponseStream, form: Format, envelope: JSON, body: SamplingBody
) -> AsyncGenerator[list[JSON], None]:
    """Yield the objects of a stream; those of one list are sent together.

    An answer is opened by its first delta, not before: the time of a client up to there is that of its first token.
    """
    options = body.stream_options or StreamOptions()
    envelope = {**envelope, "object": form.chunk, **({"usage": None} if options.include_usage else {})}
    unopened = {answer.index for answer in stream.answers}
    async with aclosing(stream.deltas()) as deltas:
        async for delta in deltas:
            choices = form.chunks(delta, delta.index in unopened)
            unopened.discard(delta.index)
            so_far = {"usage": usage([stream.answers[delta.index]])} if options.continuous_usage_stats else {}
            yield [{**envelope, "choices": [choice], **so_far} for choice in choices]
    if options.include_usage:
        yield [{**envelope, "choices": [], "usage": usage(stream.answers)}]


def usage(answers: Sequence[ChoiceStream]) -> JSON:
    """Count the tokens that were read and generated; after a stop string, those up to where it ended."""
    prompt, generated = sum(len(a.request.prompt) for a in answers), sum(a.tokens for a in answers)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


class EventStream(StreamingResponse):
    """Server-sent events, each `data: JSON`, the last `data: [DONE]`; before it, where something failed, an error.

    The requests are cancelled when the client disconnects, or when sending fails.
    """

    def __init__(self, stream: ResponseStream, objects: AsyncGenerator[list[JSON], None]) -> None:
        self._stream = stream
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        self._events = _events(objects)
        super().__init__(self._events, media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stream.while_connected(receive), aclosing(self._events):
            with suppress(OSError):  # the client is gone
                await self.stream_response(send)


async def _events(objects: AsyncGenerator[list[JSON], None]) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(objects):
            async for together in objects:
                yield b"".join(map(_event, together))
    except (APIError, ElasticError) as error:
        yield _event(as_api_error(error).body())
    yield b"data: [DONE]\n\n"


def _event(json_object: JSON) -> bytes:
    return b"data: " + json.dumps(json_object, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
