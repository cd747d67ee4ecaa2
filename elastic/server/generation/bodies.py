"""Bodies of requests read as JSON: apart from the event loop, and bounded in their parts before they are parsed.

Parsing holds the interpreter's lock to its end. What it takes grows with the objects, lists and values in a body, not
with the length of its texts: those are counted first, in Python, where other threads have their turn. So no body within
`max_body` stops the server; a long text costs next to nothing here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException

from elastic.server.protocol.fields import MOST_PROMPTS

MOST_PARTS = 50_000
"""Objects, lists and fields of a body: some fifteen for each of the messages that there may be."""
_SMALL = 64 << 10
"""Bytes of a body that is parsed at once: however it is made, that takes a few milliseconds."""


class Bodies:
    """Parses large bodies one after the other, on a thread of its own."""

    def __init__(self, *, max_model_len: int | None) -> None:
        self._most_values = None if max_model_len is None else MOST_PROMPTS * max_model_len + MOST_PARTS
        self._thread = ThreadPoolExecutor(1, "elastic-json")

    async def parse(self, body: bytes) -> Any:
        """Return the JSON of a body. Raises `HTTPException`: 400 for what is not JSON, 413 for too many parts."""
        if len(body) <= _SMALL:
            return _parsed(body)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, check_parts, body, self._most_values)
        return await loop.run_in_executor(self._thread, _parsed, body)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class JSONRoute(APIRoute):
    """A route that has the server's `Bodies` parse its body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def with_json(request: Request) -> Response:
            return await handle(_JSONRequest(request.scope, request.receive))

        return with_json


class _JSONRequest(Request):
    async def json(self) -> Any:
        bodies: Bodies = self.app.state.serving.bodies
        return await bodies.parse(await self.body())


def check_parts(body: bytes, most_values: int | None) -> None:
    """Raise `HTTPException` if a body has too many parts: as tokens, more values than all its prompts may have."""
    parts = values = 0
    for between in _between_strings(body):
        parts += sum(between.count(mark) for mark in (b"{", b"[", b":"))
        values += between.count(b",") + 1
        if parts > MOST_PARTS:
            raise HTTPException(413, f"the body has more than {MOST_PARTS:,} objects, lists and fields")
        if most_values is not None and values > most_values:
            raise HTTPException(413, f"the body has more than {most_values:,} values: no prompts that long fit here")


def _between_strings(body: bytes) -> Iterator[bytes]:
    """Yield the pieces of a JSON document that are no text: each in little time under the interpreter's lock."""
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    end = 0
    while (start := plain.find(b'"', end)) >= 0:
        yield plain[end:start]
        end = plain.find(b'"', start + 1) + 1
        if not end:  # a text without an end: the parser will say so
            return
    yield plain[end:]


def _parsed(body: bytes) -> Any:
    try:
        return from_json(body)
    except ValueError as error:
        raise HTTPException(400, f"the body is not JSON: {error}") from error
