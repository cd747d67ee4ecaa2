"""`create_app`: an engine behind an OpenAI-compatible HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from elastic.config import parse_bytes
from elastic.engines.base import Engine, GrammarCompiler
from elastic.errors import ConfigError
from elastic.server.generation.sampling_defaults import checked
from elastic.server.generation.state import ServerState
from elastic.server.hosts import check_origins
from elastic.server.http_metrics import HTTPMetricsMiddleware
from elastic.server.middleware import KEY, TOKEN, RequestMiddleware
from elastic.server.protocol import errors
from elastic.server.request_ids import REQUEST_ID, RequestIdMiddleware
from elastic.server.routes import actions as action_routes
from elastic.server.routes import deployments as deployment_routes
from elastic.server.routes import fleet, openai, responses, status, tokens
from elastic.server.routes.catalogue import Catalogue, ModelOptions
from elastic.server.tools.formats import TOOL_FORMATS

if TYPE_CHECKING:
    from elastic.cluster.deployment.deployments import Deployments

MAX_BODY = "4MiB"
BODY_TIMEOUT_S = 60.0
KEYED = ("/v1/", "/tokenize", "/detokenize")
"""Beginnings of the paths that ask for the key."""
ACTING = ("/elastic/actions", "/elastic/fleet")
"""Those that ask for the token."""


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
    body_timeout_s: float = BODY_TIMEOUT_S,
    sampling_defaults: Mapping[str, float] | None = None,
    grammars: GrammarCompiler | None = None,
    tool_call_parser: str | None = None,
    allowed_origins: Sequence[str] = (),
    deployments: Deployments | None = None,
    model_options: ModelOptions | None = None,
) -> FastAPI:
    """Make an ASGI application that serves one model under `name`.

    It starts the engine with itself and stops it at its end, unless the engine serves already: who starts an engine
    stops it. The engine may be a fleet. `tokenizer` is the model's, from transformers. `max_model_len` is the most
    tokens of prompt and answer together; None: not bounded here. With `api_key`, the paths of `KEYED` want it as a
    bearer token. `actions=True` opens `/elastic/actions`, and of a fleet `/elastic/fleet`, to those who have `token`.
    `max_body` bounds the bodies of requests, in bytes or as text, and `body_timeout_s` the seconds of one on its way.

    `sampling_defaults` are the model's own, for what a request leaves open (`generation/sampling_defaults.py`).
    `grammars` compiles the rules of structured output: the engine's compiler; None: structured output is refused.
    `tool_call_parser` names how the model writes calls of tools (`TOOL_FORMATS`); None: no `tool_choice="auto"`.
    `allowed_origins` are the origins of web pages that may use the server from a browser; `"*"` is any. Of
    `deployments` `name` is one, and requests say which of them they mean; `model_options` reads the tokenizer and such
    of the others from their paths. Those that a program deploys later are served after `app.state.models.refresh()`.

    The endpoints, their metrics and their errors are in docs/serving.md. `app.state.serving` is its `ServerState`: call
    `drain()` on it to refuse new requests. Raises `ConfigError` for options that cannot work.
    """
    token = _checked_key("token", token) if actions else None
    if actions and token is None:
        raise ConfigError("actions=True needs a token: whoever reaches the server could change the model")
    _check_options(name, max_model_len, body_timeout_s, tool_call_parser)
    serving = ServerState(
        engine,
        tokenizer,
        name,
        max_model_len=max_model_len,
        sampling_defaults=checked(sampling_defaults or {}),
        grammars=grammars,
        tool_format=None if tool_call_parser is None else TOOL_FORMATS[tool_call_parser],
    )
    app = FastAPI(title="Elastic", description="An elastic language model", lifespan=partial(_lifespan, serving))
    app.state.serving = serving
    app.state.models = models = Catalogue(serving, deployments, model_options)
    errors.install(app)
    acting = (action_routes.routes(serving), fleet.routes(serving), deployment_routes.routes(models))
    asking = (openai.routes(models), responses.routes(models), tokens.routes(models), status.routes(models))
    for routes in (*asking, *(acting if actions else (action_routes.closed(),))):
        app.include_router(routes)
    keys = {**dict.fromkeys(KEYED, (_checked_key("api_key", api_key), KEY)), **dict.fromkeys(ACTING, (token, TOKEN))}
    _add_middleware(app, serving, keys, max_body, body_timeout_s, allowed_origins)
    return app


def _checked_key(option: str, key: str | None) -> str | None:
    """Return a key without space around it, which no header keeps. Raises `ConfigError` for one that none can have."""
    if key is None:
        return None
    key = key.strip()
    if not key:
        raise ConfigError(f"{option}={key!r} lets everyone in; give a key, or None for no key")
    if not key.isprintable():
        raise ConfigError(f"{option} has a line break or another character that no client can send; give one line")
    return key


def _check_options(name: str, max_model_len: int | None, body_timeout_s: float, tool_call_parser: str | None) -> None:
    """Raise `ConfigError` for options that cannot work."""
    if max_model_len is not None and max_model_len < 2:
        raise ConfigError(f"max_model_len={max_model_len} leaves no room for a prompt and an answer")
    if not name.strip():
        raise ConfigError(f"name={name!r} is empty; give the model a name")
    if not body_timeout_s > 0:
        raise ConfigError(f"body_timeout_s={body_timeout_s} must be above 0")
    if tool_call_parser is not None and tool_call_parser not in TOOL_FORMATS:
        raise ConfigError(f"tool_call_parser={tool_call_parser!r}: choose one of {', '.join(TOOL_FORMATS)}")


def _add_middleware(
    app: FastAPI,
    serving: ServerState,
    keys: Mapping[str, tuple[str | None, str]],
    max_body: int | str,
    body_timeout_s: float,
    allowed_origins: Sequence[str],
) -> None:
    """Add the checks of requests; what is added last sees a request first."""
    body_bytes = parse_bytes(max_body, option="max_body")
    if body_bytes < 1:
        raise ConfigError(f"max_body={max_body!r} refuses every request; give bytes, such as '4MiB'")
    check_origins(allowed_origins, "allowed_origins")
    app.add_middleware(
        RequestMiddleware, serving=serving, keys=keys, max_body_bytes=body_bytes, body_timeout_s=body_timeout_s
    )
    if allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, "Retry-After"],
        )
    app.add_middleware(RequestIdMiddleware)
    app.add_middleware(HTTPMetricsMiddleware, registry=serving.metrics.registry)


@contextlib.asynccontextmanager
async def _lifespan(serving: ServerState, app: FastAPI) -> AsyncIterator[None]:
    ours = not serving.engine.serving
    if ours:
        serving.engine.start()
    try:
        yield
    finally:
        serving.drain()
        serving.close()
        app.state.models.close()
        if ours:
            await asyncio.to_thread(serving.engine.stop, drain=False, timeout_s=0.0 if serving.forced else None)
