"""What a request must pass before an endpoint sees it."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Mapping
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from elastic.server.errors import APIError
from elastic.server.serving import Serving

_DISCARDED = 4
"""Times the limit: how much of a body that is refused is still read, so that the client reads the answer."""
_DISCARD_S = 5.0
GENERATING = ("/v1/completions", "/v1/chat/completions")


class Door:
    """ASGI middleware: keys, a bound on bodies, JSON only; nothing new while the server drains.

    JSON only keeps web pages out: without it, a page that someone looks at could post to a server on their machine.
    """

    def __init__(self, app: ASGIApp, serving: Serving, keys: Mapping[str, str | None], max_body_bytes: int) -> None:
        self._app, self._serving, self._limit = app, serving, max_body_bytes
        self._keys = {prefix: key for prefix, key in keys.items() if key}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except APIError as error:
            await _discard(receive, _DISCARDED * self._limit)
            await error.response()(scope, receive, send)
            return
        if _path(scope) in GENERATING:
            with self._serving.counted():
                await self._app(scope, self._bounded(receive), send)
        else:
            await self._app(scope, self._bounded(receive), send)

    def _check(self, scope: Scope) -> None:
        headers, path = Headers(scope=scope), _path(scope)
        for prefix, key in self._keys.items():
            if path.startswith(prefix):
                _check_key(headers.get("authorization", ""), key)
        if scope["method"] != "POST":
            return
        if path in GENERATING:
            self._serving.require_serving()
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise APIError(415, "send the body as Content-Type: application/json", code="unsupported_media_type")
        length = headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length[:20]) > self._limit:
            raise APIError(413, self._too_large(), code="body_too_large")

    def _bounded(self, receive: Receive) -> Receive:
        seen = 0

        async def bounded() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._limit:
                if message.get("more_body"):
                    await _discard(receive, _DISCARDED * self._limit)
                raise HTTPException(413, self._too_large())
            return message

        return bounded

    def _too_large(self) -> str:
        return f"the body is larger than {self._limit:,} bytes"


def _path(scope: Scope) -> str:
    """The path inside the application, also where it is mounted under another."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _check_key(given: str, key: str) -> None:
    """Raises `APIError`; takes as long for a key that is nearly right as for one that is not."""
    scheme, _, token = given.partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode("latin-1"), key.encode()):
        headers = {"WWW-Authenticate": "Bearer"}
        message = "send the key of this server as Authorization: Bearer KEY"
        raise APIError(401, message, type="authentication_error", code="invalid_api_key", headers=headers)


async def _discard(receive: Receive, limit: int) -> None:
    """Read the rest of a body and forget it."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            seen, more = 0, True
            while more and seen <= limit:
                message = await receive()
                seen += len(message.get("body", b""))
                more = message.get("more_body", False)
