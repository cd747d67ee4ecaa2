"""The endpoints of OpenAI's API, in its formats: completions, chat completions, models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HTTPRequest

from elastic.engines.base import Request
from elastic.server.formats.base import usage
from elastic.server.formats.chat import ChatFormat
from elastic.server.formats.completions import CompletionFormat
from elastic.server.generation.bodies import JSONRoute
from elastic.server.generation.request_builder import GeneratingBody
from elastic.server.generation.response_stream import AnswerOptions, ResponseStream, TextDelta
from elastic.server.generation.state import ServerState
from elastic.server.protocol.chat import ChatBody
from elastic.server.protocol.completions import CompletionBody
from elastic.server.protocol.errors import invalid
from elastic.server.protocol.sampling import StreamOptions
from elastic.server.protocol.tools import NamedTool
from elastic.server.routes.catalogue import Catalogue
from elastic.server.routes.event_stream import EventStream, data_events, encoded
from elastic.server.tools.base import ToolParser
from elastic.server.tools.forced import ArgumentsParser, ListParser

JSON = dict[str, Any]
AnswerFormat = ChatFormat | CompletionFormat
_MANY = 4096
"""Reported log-probabilities from which a document is made apart from the event loop."""
_LONG = 65_536
"""Characters of answers from which it is too."""


def routes(models: Catalogue) -> APIRouter:
    """Make the endpoints."""
    router = APIRouter(route_class=JSONRoute)

    @router.post("/v1/completions")
    async def completions(body: CompletionBody, http: HTTPRequest) -> Response:
        arrived_s = time.perf_counter()
        serving = models.named(body.model)
        body.check()
        requests = await serving.prompts.completion(body, arrived_s)
        echoes = await serving.prompts.echoes(body, requests) if body.echo else ()
        form = CompletionFormat(body, serving.token_texts, echoes)
        return await _answer(serving, form, body, requests, http)

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, http: HTTPRequest) -> Response:
        arrived_s = time.perf_counter()
        serving = models.named(body.model)
        body.check()
        parser = tool_parser(serving, body)
        requests = await serving.prompts.chat(body, arrived_s)
        return await _answer(serving, ChatFormat(body, serving.token_texts, parser), body, requests, http)

    @router.get("/v1/models")
    async def list_models() -> JSON:
        return {"object": "list", "data": [_card(serving) for serving in models.all()]}

    @router.get("/v1/models/{model:path}")
    async def show_model(model: str) -> JSON:
        return _card(models.named(model))

    return router


def tool_parser(serving: ServerState, body: ChatBody) -> Callable[[], ToolParser] | None:
    """Return what makes the parser of an answer, None where it calls no tools. Raises `APIError`."""
    match body.choice_of_tools:
        case "none":
            return None
        case "auto":
            if serving.tool_format is None:
                message = "'auto' needs to know how the model writes calls: start the server with --tool-call-parser"
                raise invalid("tool_choice", message, "unsupported_value")
            names = frozenset(tool.function.name for tool in body.tools or ())
            return partial(serving.tool_format.make, *(() if serving.tool_format.marked else (names,)))
        case "required":
            return ListParser
        case NamedTool() as named:
            return partial(ArgumentsParser, named.function.name)


def answer_options(serving: ServerState, body: GeneratingBody, *, calls: bool = False) -> AnswerOptions:
    """Return how the tokens of the answers become text; with `calls`, the marks of calls are kept in it."""
    marks = calls and serving.tool_format is not None and serving.tool_format.special
    return AnswerOptions(
        stops=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_tokens=tuple(body.stop_token_ids or ()),
        keep_stop=bool(body.include_stop_str_in_output),
        skip_special=body.skip_special_tokens is not False and not marks,
        report_tokens=body.top_tokens is not None or bool(body.return_token_ids),
        generate=body.max_tokens != 0,
    )


def _card(serving: ServerState) -> JSON:
    card = {"id": serving.name, "object": "model", "created": int(serving.since_s), "owned_by": "elastic"}
    return {**card, "max_model_len": serving.longest_request}


async def _answer(
    serving: ServerState, form: AnswerFormat, body: GeneratingBody, requests: Sequence[Request], http: HTTPRequest
) -> Response:
    """Answer with a stream, or when all answers are complete."""
    options = answer_options(serving, body, calls=isinstance(body, ChatBody) and body.choice_of_tools == "auto")
    stream = serving.respond(requests, options, form.operation, eager=bool(body.stream or body.stop))
    stream.submit()
    envelope = {"id": f"{form.prefix}-{requests[0].id}", "created": int(time.time()), "model": serving.name}
    if body.stream:
        return EventStream(stream, data_events(_chunks(stream, form, envelope, body)))
    async with stream.while_connected(http.receive):
        answers = await stream.whole()

    def document() -> bytes:
        kept = _best(answers, requests, body.n or 1)
        choices = [form.choice(answer, stream.answers[i]) for i, answer in kept]
        fields = {**envelope, "object": form.whole, "choices": choices}
        return encoded({**fields, **form.extra(stream.answers), "usage": usage(stream.answers)})

    reports = sum(len(a.tokens) * (1 + (requests[0].logprobs or 0)) for a in answers)
    reports += sum(len(r.prompt) * (1 + r.prompt_logprobs) for r in requests if r.prompt_logprobs is not None)
    large = reports > _MANY or sum(len(answer.text) for answer in answers) > _LONG
    content = await asyncio.to_thread(document) if large else document()
    return Response(content, media_type="application/json")


def _best(answers: Sequence[TextDelta], requests: Sequence[Request], kept: int) -> list[tuple[int, TextDelta]]:
    """Return the likeliest answers to each prompt, numbered anew, with their numbers up to here."""

    def likelihood(number: int) -> float:
        reported = [token.logprobs.logprob for token in answers[number].tokens if token.logprobs is not None]
        return sum(reported) / max(1, len(reported))

    best: list[tuple[int, TextDelta]] = []
    start = 0
    for request in requests:
        numbers: Sequence[int] = range(start, start + request.n)
        if request.n > kept:
            numbers = sorted(numbers, key=likelihood, reverse=True)[:kept]
        best += [(number, replace(answers[number], index=len(best) + i)) for i, number in enumerate(numbers)]
        start += request.n
    return best


async def _chunks(
    stream: ResponseStream, form: AnswerFormat, envelope: JSON, body: GeneratingBody
) -> AsyncGenerator[list[JSON], None]:
    """Yield the objects of a stream; those of one list are sent together.

    An answer is opened by its first delta, not before: the time of a client up to there is that of its first token.
    """
    options = body.stream_options or StreamOptions()
    envelope = {**envelope, "object": form.chunk, **({"usage": None} if options.include_usage else {})}
    async with aclosing(stream.deltas()) as deltas:
        async for delta in deltas:
            answer = stream.answers[delta.index]
            so_far = {"usage": usage([answer])} if options.continuous_usage_stats else {}
            yield [{**envelope, "choices": [choice], **so_far} for choice in form.choices(delta, answer)]
    if options.include_usage:
        yield [{**envelope, "choices": [], "usage": usage(stream.answers)}]
