"""`create_app`: an engine behind an OpenAI-compatible HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from fastapi import FastAPI, Response
from fastapi import Request as HTTPRequest
from fastapi.responses import JSONResponse

from elastic.config import parse_bytes
from elastic.engines.engine import Engine
from elastic.errors import ConfigError
from elastic.server import actions as action_routes
from elastic.server import errors, openai
from elastic.server.door import Door
from elastic.server.serving import Serving
from elastic.server.status import document

MAX_BODY = "4MiB"


def create_app(
    engine: Engine,
    tokenizer: Any,
    name: str,
    *,
    max_model_len: int | None = None,
    api_key: str | None = None,
    token: str | None = None,
    actions: bool = False,
    max_body: int | str = MAX_BODY,
) -> FastAPI:
    """An ASGI application that serves one model under `name`.

    It starts the engine with itself and stops it at its end, unless the engine serves already: who starts an engine
    stops it. `tokenizer` is the model's, from transformers. `max_model_len` is the most tokens of prompt and answer
    together; None: not bounded here. With `api_key`, `/v1/…` wants it as a bearer token. `actions=True` opens
    `/elastic/actions` to those who have `token`. `max_body` bounds the bodies of requests, in bytes or as text.

    The endpoints, their metrics and their errors are in docs/serving.md. `app.state.serving` is its `Serving`: call
    `drain()` on it to refuse new requests. Raises `ConfigError` for options that cannot work.
    """
    if actions and not token:
        raise ConfigError("actions=True needs a token: whoever reaches the server could change the model")
    if max_model_len is not None and max_model_len < 2:
        raise ConfigError(f"max_model_len={max_model_len} leaves no room for a prompt and an answer")
    serving = Serving(engine, tokenizer, name, max_model_len=max_model_len)
    app = FastAPI(title="Elastic", description="An elastic language model", lifespan=partial(_lifespan, serving))
    app.state.serving = serving
    errors.install(app)
    app.include_router(openai.routes(serving))
    app.include_router(action_routes.routes(engine) if actions else action_routes.closed())
    _add_views(app, serving)
    keys = {"/v1/": api_key, "/elastic/actions": token if actions else None}
    app.add_middleware(Door, serving=serving, keys=keys, max_body_bytes=parse_bytes(max_body, option="max_body"))
    return app


@contextlib.asynccontextmanager
async def _lifespan(serving: Serving, app: FastAPI) -> AsyncIterator[None]:
    ours = not serving.engine.serving
    if ours:
        serving.engine.start()
    try:
        yield
    finally:
        serving.drain()
        serving.prompts.close()
        if ours:
            await asyncio.to_thread(serving.engine.stop, drain=False)


def _add_views(app: FastAPI, serving: Serving) -> None:
    """The endpoints that only look. They run in threads: the runtime may be busy for a moment."""

    @app.get("/health")
    async def health() -> Response:
        ok = serving.state == "serving"
        headers = {} if ok else {"Retry-After": str(errors.RETRY_AFTER_S)}
        return JSONResponse({"status": serving.state}, 200 if ok else 503, headers)

    @app.get("/metrics")
    def metrics(http: HTTPRequest) -> Response:
        body, content_type = serving.metrics.render(http.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})

    @app.get("/elastic/status")
    def status() -> Response:
        return JSONResponse(document(serving.engine, serving.name, serving.state, serving.since_s))
