"""`/elastic/actions`: the actions on a running model, their dry runs, doing them, and preparing them to be committed.

`GET` lists the kinds. `POST {"actions": [{"kind": "swap", "layers": [3, 4], "variant": "int4"}], "dry_run": true}`
answers with the steps of a plan; without `dry_run`, with the results, once the actions are committed: all, or none.
Of a fleet, `"rank"` says which rank is meant; without it, all ranks do the same, all or none.

`POST /elastic/actions/prepare {"actions", "id", "timeout_s", "rank"}` takes the pages and makes the copies; then
`POST /elastic/actions/ID/commit` switches to them, and `POST /elastic/actions/ID/rollback` gives all back. Both can be
asked again; a transaction that nobody ends is rolled back after `timeout_s`.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, get_args
from uuid import uuid4

from fastapi import APIRouter

from elastic.server.fleets.targets import ActionTargets, Target
from elastic.server.generation.state import ServerState
from elastic.server.protocol.actions import ActionsBody, AnyActionBody, PrepareBody, RankActions, action_of
from elastic.server.protocol.errors import APIError
from elastic.server.protocol.fields import StrictBody
from elastic.server.routes import acting
from elastic.server.routes.status import plain, with_kind
from elastic.types import Action


def closed() -> APIRouter:
    """Make the endpoints while actions are off: they tell how to open them."""
    router = APIRouter()

    @router.api_route("/elastic/actions", methods=["GET", "POST"], include_in_schema=False)
    @router.api_route("/elastic/actions/{rest:path}", methods=["GET", "POST"], include_in_schema=False)
    @router.api_route("/elastic/fleet/{rest:path}", methods=["GET", "POST"], include_in_schema=False)
    async def off(rest: str = "") -> None:
        raise APIError(404, "actions are off; start the server with --enable-actions and a token", code="not_found")

    return router


def routes(serving: ServerState) -> APIRouter:
    """Make the endpoints."""
    router = APIRouter(route_class=acting.ActingRoute)
    targets = ActionTargets(serving.engine, serving.fleet)

    @router.get("/elastic/actions")
    async def kinds() -> dict[str, Any]:
        targets.require()
        return {"kinds": dict(map(_described, get_args(get_args(AnyActionBody)[0])))}

    @router.post("/elastic/actions")
    async def act(body: ActionsBody) -> dict[str, Any]:
        return await asyncio.to_thread(_act, targets, body)

    @router.post("/elastic/actions/prepare")
    async def prepare(body: PrepareBody) -> dict[str, Any]:
        return await asyncio.to_thread(_prepare, targets, body)

    @router.post("/elastic/actions/{id}/commit")
    async def commit(id: str) -> dict[str, Any]:
        return {"id": id, "results": _records(await acting.act(partial(targets.commit, id)))}

    @router.post("/elastic/actions/{id}/rollback")
    async def rollback(id: str) -> dict[str, Any]:
        await acting.act(partial(targets.rollback, id))
        return {"id": id}

    return router


def _described(model: type[StrictBody]) -> tuple[str, dict[str, Any]]:
    """Return the kind of an action, and its description for clients."""
    schema = model.model_json_schema()
    properties: dict[str, dict[str, Any]] = schema["properties"]
    kind: str = properties.pop("kind")["const"]
    return kind, {
        "what": " ".join(str(model.__doc__).split()),
        "fields": {name: {key: field[key] for key in field if key != "title"} for name, field in properties.items()},
        "required": [name for name in schema["required"] if name != "kind"],
    }


def _act(targets: ActionTargets, body: ActionsBody) -> dict[str, Any]:
    """Plan the actions, or do them."""
    asked = _asked(targets, body)
    if body.dry_run:
        steps = [(target, step.action, step) for target, actions in asked.items() for step in target.plan(actions)]
        return {"dry_run": True, "steps": _records(steps)}
    return {"dry_run": False, "results": _records(targets.apply(asked))}


def _prepare(targets: ActionTargets, body: PrepareBody) -> dict[str, Any]:
    asked = _asked(targets, body)
    prepared = targets.prepare(asked, body.id or uuid4().hex, body.timeout_s)
    steps = [(target, step.action, step) for target, each in prepared.items() for step in each.steps]
    told = list(prepared.values())
    return {
        "id": told[0].id,
        "expires_s": min(each.expires_s for each in told),
        "moved_bytes": sum(each.moved_bytes for each in told),
        "pages": sum(each.pages for each in told),
        "steps": _records(steps),
    }


def _asked(targets: ActionTargets, body: RankActions) -> dict[Target, list[Action]]:
    """Return the actions for each model that is meant. Raises `ConfigError`."""
    asked = {}
    for target in targets.named(body.rank):
        status = target.status()
        places = [kv.place for kv in status.kv]
        asked[target] = [action_of(each, places, status.layers, target.at_home) for each in body.actions]
    return asked


def _records(told: list[tuple[Target, Action, Any]]) -> list[dict[str, Any]]:
    """Return steps or results as JSON, with their actions, and their ranks where there are several."""
    return [
        {**plain(value), "action": with_kind(action), **({"rank": target.name} if target.name else {})}
        for target, action, value in told
    ]
