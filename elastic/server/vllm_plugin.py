"""`/elastic/status` and `/elastic/actions` in vLLM's own server: a plugin of the group `vllm.endpoint_plugins`.

vLLM loads it when `VLLM_PLUGINS` names it. The status is the document of our own server, for `elastic top`. Actions are
off unless the environment has `ELASTIC_ACTIONS_TOKEN`, which clients then send as `Authorization: Bearer`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, HTTPException

from elastic.controller.snapshot import RequestStats
from elastic.engines.vllm.client.proxy import AsyncRemoteRuntime, runtimes
from elastic.errors import BackendUnavailable, CapacityError, ConfigError, ElasticError, NotFound
from elastic.server.middleware import ASKS, has_key
from elastic.server.protocol.actions import ActionsBody, action_of
from elastic.server.routes.status import about_model, about_server, plain, with_kind

TOKEN = "ELASTIC_ACTIONS_TOKEN"
KINDS = ("swap", "restore", "release", "resize_kv")
"""Of actions that ranks of vLLM can do: they have one place each."""


class ElasticEndpoints:
    """vLLM's `EndpointPlugin`."""

    name = "elastic"
    required_tasks = ("generate",)
    _client: Any = None  # an `AsyncLLM`, once there is one; then the other two are known
    _model, _since_s = "", 0.0

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes to vLLM's server."""

        @app.get("/elastic/status")
        async def status() -> dict[str, Any]:
            return await answered(self._of_all(self._document))

        @app.get("/elastic/actions")
        async def kinds() -> dict[str, Any]:
            return {"kinds": KINDS}

        @app.post("/elastic/actions", dependencies=[Depends(require_token)])
        async def act(body: ActionsBody) -> dict[str, Any]:
            return await answered(self._of_all(partial(do, body)))

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Reach the engine by its `collective_rpc`."""
        if engine_client is not None:
            self._model = (getattr(args, "served_model_name", None) or [args.model])[0]
            self._client, self._since_s = engine_client, time.time()

    async def _of_all(self, ask: Callable[[AsyncRemoteRuntime], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        """Ask all engines; return the first one's answer, and those of all under `engines` if there are several.

        Raises what one of them raised, when all have answered.
        """
        if self._client is None:
            raise HTTPException(503, "the engine is not there yet")
        answers = await asyncio.gather(*map(ask, runtimes(self._client)), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        first: Any = answers[0]
        return {**first, "engines": answers} if len(answers) > 1 else first

    async def _document(self, runtime: AsyncRemoteRuntime) -> dict[str, Any]:
        """Return the status document, as `elastic.server.routes.status` describes it."""
        snapshot = await runtime.snapshot()
        traffic = snapshot.traffic if snapshot is not None else RequestStats()
        return {
            **about_server(self._model, "serving", self._since_s, traffic, {}),
            **about_model(await runtime.status(), await runtime.events(), await runtime.health()),
            "layers": list(await runtime.form()),
        }


async def answered(answer: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """Await an answer; our errors become HTTP's."""
    try:
        return await answer
    except ElasticError as error:
        codes: dict[type, int] = {ConfigError: 400, NotFound: 404, CapacityError: 409, BackendUnavailable: 503}
        raise HTTPException(codes.get(type(error), 409), str(error)) from error


def require_token(authorization: Annotated[str, Header()] = "") -> None:
    """Raise `HTTPException` unless actions are on and the header has their token."""
    token = os.environ.get(TOKEN, "").strip()
    if not token:
        raise HTTPException(404, f"actions are off; start the server with {TOKEN} in its environment")
    if not has_key(authorization, token):
        raise HTTPException(401, f"send the token of {TOKEN} as Authorization: Bearer", ASKS)


async def do(body: ActionsBody, runtime: AsyncRemoteRuntime) -> dict[str, Any]:
    """Plan actions, or do them on all ranks of one engine. Raises `ConfigError` for what these cannot do."""
    if body.rank is not None:
        raise ConfigError(f"rank={body.rank!r}: all ranks of vLLM do the same; leave it out")
    for asked in body.actions:
        if asked.kind not in KINDS:
            raise ConfigError(f"kind={asked.kind!r}: an engine of vLLM has one place for each rank; {', '.join(KINDS)}")
    status = await runtime.status()
    actions = [action_of(asked, [status.kv[0].place], status.layers) for asked in body.actions]
    if body.dry_run:
        steps = await runtime.plan(actions)
        return {"dry_run": True, "steps": [{**plain(step), "action": with_kind(step.action)} for step in steps]}
    pairs = zip(actions, await runtime.apply(actions), strict=True)
    return {"dry_run": False, "results": [{**plain(result), "action": with_kind(done)} for done, result in pairs]}
