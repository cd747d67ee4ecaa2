"""The checks of a request before an endpoint sees it."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from elastic.server.generation.state import SHUTTING_DOWN, ServerState
from elastic.server.protocol.errors import RETRY_AFTER_S, APIError, as_api_error

_DISCARDED = 4
"""Times the limit, of a body that is refused, are still read, so that the client reads the answer."""
_DISCARD_S = 2.0
_POLL_S = 0.25
"""Between two looks whether the server drains, while the rest of a body is awaited."""
_CLOSE = {"Connection": "close"}
"""Headers of an answer to a body that is not read to its end."""
ASKS = {"WWW-Authenticate": "Bearer"}
"""Headers of an answer to a request without the key."""
KEY = "the key of this server as Authorization: Bearer KEY"
TOKEN = (
    "the token for actions, not the API key, as Authorization: Bearer TOKEN; it is what the server was started with as "
    "--token-file, ELASTIC_TOKEN or token="
)
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


class RequestMiddleware:
    """ASGI middleware: keys, bounds on the size of bodies and on their time, JSON only; nothing new while it drains.

    JSON only keeps web pages out: without it, a page that someone looks at could post to a server on their machine.
    """

    def __init__(
        self,
        app: ASGIApp,
        serving: ServerState,
        keys: Mapping[str, tuple[str | None, str]],
        max_body_bytes: int,
        body_timeout_s: float,
    ) -> None:
        """`keys` are by beginnings of paths, each with the words that ask for it; None: none is asked for."""
        self._app, self._serving, self._limit = app, serving, max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._too_large = f"the body is larger than {max_body_bytes:,} bytes"
        self._keys = {prefix: (key, words) for prefix, (key, words) in keys.items() if key}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # the answer to a GET; the server leaves out its body
            scope = {**scope, "method": "GET"}
        try:
            self._check(scope)
        except APIError as error:
            await _discard(receive, _DISCARDED * self._limit)
            await error.response()(scope, receive, send)
            return
        with self._serving.counted() if path_of(scope) in GENERATING else nullcontext():
            await self._answered(scope, self._bounded(receive), send)

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the app answer. What fails in it is answered here: other middleware adds headers on the way out."""
        began = False

        async def noted(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:  # it is raised again: the server logs it
            if not began:
                await as_api_error(error).response()(scope, receive, noted)
            raise

    def _check(self, scope: Scope) -> None:
        headers, path = Headers(scope=scope), path_of(scope)
        for prefix, (key, words) in self._keys.items():
            if path.startswith(prefix) and not has_key(headers.get("authorization", ""), key):
                kind, code = "authentication_error", "invalid_api_key"
                raise APIError(401, f"send {words}", type=kind, code=code, headers=ASKS)
        if scope["method"] != "POST":
            return
        if path in GENERATING:
            self._serving.require_serving()
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise APIError(415, "send the body as Content-Type: application/json", code="unsupported_media_type")
        length = headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length[:20]) > self._limit:
            raise APIError(413, self._too_large, code="body_too_large")

    def _bounded(self, receive: Receive) -> Receive:
        """Wrap `receive` with the bounds on a body."""
        nbytes, complete = 0, False
        until_s = time.monotonic() + self._body_timeout_s

        async def bounded() -> Message:
            nonlocal nbytes, complete
            message = await (receive() if complete else self._in_time(receive, until_s))
            complete = not message.get("more_body")
            nbytes += len(message.get("body", b""))
            if nbytes > self._limit:
                if not complete:
                    await _discard(receive, _DISCARDED * self._limit)
                raise HTTPException(413, self._too_large, _CLOSE)
            return message

        return bounded

    async def _in_time(self, receive: Receive, until_s: float) -> Message:
        """Receive more of a body. Raises `HTTPException` when its time is over, or the server drains."""
        while True:
            left_s = until_s - time.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(_POLL_S, left_s)):
                    return await receive()
            if left_s < _POLL_S:
                raise HTTPException(408, f"the body did not come within {self._body_timeout_s:g} seconds", _CLOSE)
            if self._serving.state == "draining":
                raise HTTPException(503, SHUTTING_DOWN, {"Retry-After": str(RETRY_AFTER_S), **_CLOSE})


def path_of(scope: Scope) -> str:
    """Return the path inside the application, also where it is mounted under another, as its router reads it."""
    path: str = scope["path"]
    inside = path.removeprefix(scope.get("root_path", ""))
    return inside if inside[:1] in ("", "/") else path  # the root path ends within a name: it is none of this path


def has_key(authorization: str, key: str) -> bool:
    """Tell whether a header has the key, after the same time whether it is nearly right or not."""
    scheme, _, given = authorization.partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), key.encode())


async def _discard(receive: Receive, limit: int) -> None:
    """Read the rest of a body, up to `limit` bytes, and forget it."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            nbytes, more = 0, True
            while more and nbytes <= limit:
                message = await receive()
                nbytes += len(message.get("body", b""))
                more = message.get("more_body", False)
