"""How many HTTP requests came to what, and how long they took."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from elastic.server.middleware import path_of

PROBES = ("/health", "/metrics", "/elastic/status")
_METHODS = ("GET", "HEAD", "POST", "OPTIONS")
_SECONDS = tuple(0.005 * 2**i for i in range(16))


class HTTPMetricsMiddleware:
    """ASGI middleware. Requests are told apart by the template of their route; probes are not counted."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        self._requests = Counter(
            "elastic_http_requests", "Requests by the class of their status.", ("handler", "method", "status"),
            registry=registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "elastic_http_request_duration_seconds", "From a request's head to the end of its answer.",
            ("handler", "method"), buckets=_SECONDS, registry=registry,
        )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or path_of(scope) in PROBES:
            await self._app(scope, receive, send)
            return
        status, began_s = 500, time.perf_counter()

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            handler = getattr(scope.get("route"), "path", "none")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._requests.labels(handler, method, f"{status // 100}xx").inc()
            self._seconds.labels(handler, method).observe(time.perf_counter() - began_s)
