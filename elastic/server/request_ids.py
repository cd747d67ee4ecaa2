"""`X-Request-Id`: every answer has the one of its request, or a new one, so that logs of both sides can be matched."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID = "X-Request-Id"
_LONGEST = 256


@dataclass(frozen=True)
class RequestIdMiddleware:
    """ASGI middleware."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        usable = 0 < len(given) <= _LONGEST and given.isascii() and given.isprintable()
        request_id = given if usable else uuid.uuid4().hex

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        await self.app(scope, receive, with_id)
