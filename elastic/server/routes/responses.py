"""The endpoint of OpenAI's Responses API: texts and functions, whole or as a stream of events; nothing is stored."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HTTPRequest

from elastic.server.formats.responses import ResponsesFormat
from elastic.server.generation.bodies import JSONRoute
from elastic.server.generation.response_stream import ResponseStream
from elastic.server.protocol.errors import APIError
from elastic.server.protocol.responses import ResponsesBody
from elastic.server.routes.catalogue import Catalogue
from elastic.server.routes.event_stream import EventStream, encoded, sent_events
from elastic.server.routes.openai import answer_options, tool_parser

JSON = dict[str, Any]
_FIELDS = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
"""Fields of the chat, and those of the body that it is made of."""


def routes(models: Catalogue) -> APIRouter:
    """Make the endpoint."""
    router = APIRouter(route_class=JSONRoute)

    @router.post("/v1/responses")
    async def responses(body: ResponsesBody, http: HTTPRequest) -> Response:
        arrived_s = time.perf_counter()
        serving = models.named(body.model)
        body.check()
        try:
            chat = body.as_chat()
            parser = tool_parser(serving, chat)
            requests = await serving.prompts.chat(chat, arrived_s)
        except APIError as error:
            raise _of_body(error) from error
        form = ResponsesFormat(body, serving.name, requests[0].id, serving.token_texts, parser)
        options = answer_options(serving, chat, calls=chat.choice_of_tools == "auto")
        stream = serving.respond(requests, options, "chat", eager=bool(body.stream))
        stream.submit()
        if body.stream:
            return EventStream(stream, sent_events(_objects(stream, form), form.failure, named=True))
        async with stream.while_connected(http.receive):
            (answer,) = await stream.whole()
        form.events(answer)
        status = form.closing(answer, stream.answers[0])["response"]
        return Response(encoded(status), media_type="application/json")

    return router


def _of_body(error: APIError) -> APIError:
    """Return an error of the chat as one of the body that was sent."""
    field, dot, rest = (error.param or "").partition(".")
    if field not in _FIELDS:
        return error
    name = _FIELDS[field]
    message = error.message.replace(field, name, 1)
    return APIError(error.status, message, param=name + dot + rest, code=error.code)


async def _objects(stream: ResponseStream, form: ResponsesFormat) -> AsyncGenerator[list[JSON], None]:
    """Yield the events; those of one list are sent together."""
    yield form.opening()
    async with aclosing(stream.deltas()) as deltas:
        async for delta in deltas:
            events = form.events(delta)
            yield [*events, form.closing(delta, stream.answers[0])] if delta.finish else events
