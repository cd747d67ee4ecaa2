"""Answers as server-sent events."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from elastic.errors import ElasticError
from elastic.server.generation.response_stream import ResponseStream
from elastic.server.protocol.errors import APIError, as_api_error

logger = logging.getLogger(__name__)
JSON = dict[str, Any]


class EventStream(StreamingResponse):
    """The events of `events`. The requests are cancelled when the client disconnects, or when sending fails."""

    def __init__(self, stream: ResponseStream, events: AsyncGenerator[bytes, None]) -> None:
        self._stream = stream
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        self._events = events
        super().__init__(self._events, media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stream.while_connected(receive), aclosing(self._events):
            with suppress(OSError):  # the client is gone
                await self.stream_response(send)


async def data_events(objects: AsyncGenerator[list[JSON], None]) -> AsyncGenerator[bytes, None]:
    """Yield each object as `data: JSON`, the last `data: [DONE]`; before it, where something failed, an error."""
    async with aclosing(sent_events(objects, APIError.body)) as events:
        async for together in events:
            yield together
    yield b"data: [DONE]\n\n"


async def sent_events(
    objects: AsyncGenerator[list[JSON], None], of_error: Callable[[APIError], JSON], *, named: bool = False
) -> AsyncGenerator[bytes, None]:
    """Yield lists of objects as events, `named` ones by their type; where something fails, the error's at the end."""

    def written(together: list[JSON]) -> bytes:
        names = [f"event: {each['type']}\n".encode() if named else b"" for each in together]
        return b"".join(name + b"data: " + encoded(each) + b"\n\n" for name, each in zip(names, together, strict=True))

    try:
        async with aclosing(objects):
            async for together in objects:
                yield written(together)
    except Exception as error:  # the client is told of any: the status was sent long ago
        if not isinstance(error, APIError | ElasticError):
            logger.exception("a stream failed")
        yield written([of_error(as_api_error(error))])


def encoded(json_object: Any) -> bytes:
    """Return JSON as it is sent."""
    return json.dumps(json_object, ensure_ascii=False, separators=(",", ":")).encode()
