"""`/elastic/actions`: the actions on a running model, their dry runs, and doing them.

`GET` lists the kinds. `POST {"actions": [{"kind": "swap", "layers": [3, 4], "variant": "int4"}], "dry_run": true}`
answers with the steps of a plan; without `dry_run`, with the results, once the actions are committed: all, or none.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal, get_args

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from elastic.config import parse_limit
from elastic.engines.base import Engine
from elastic.errors import CapacityError, ConfigError
from elastic.runtime.runtime import Runtime
from elastic.server.generation.bodies import JSONRoute
from elastic.server.protocol.errors import APIError
from elastic.server.routes.status import plain, with_kind
from elastic.types import Action, Evict, Migrate, MigrateKV, Release, Replicate, ResizeKV, Restore, Swap

WHY = "by HTTP"
Layers = Annotated[list[int], Field(min_length=1, max_length=10_000, fail_fast=True)]
Names = Annotated[list[str], Field(max_length=100, fail_fast=True)]


class _ActionBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class SwapBody(_ActionBody):
    """Decoder layers, or parts of them, in another variant."""

    kind: Literal["swap"]
    layers: Layers
    variant: str
    parts: Names = []


class RestoreBody(_ActionBody):
    """The full weights; without `layers`, of all that were at their place when the model was wrapped."""

    kind: Literal["restore"]
    layers: Layers | None = None
    parts: Names = []


class ReleaseBody(_ActionBody):
    """The weights of layers leave for host memory."""

    kind: Literal["release"]
    layers: Layers


class MigrateBody(_ActionBody):
    """Layers, or parts of them, at another place from then on, in the variant that they are in."""

    kind: Literal["migrate"]
    layers: Layers
    place: str
    parts: Names = []


class PlaceBody(_ActionBody):
    """Layers, and the place where the action has them."""

    layers: Layers
    place: str


class MigrateKVBody(PlaceBody):
    """The KV cache of layers at another place from then on."""

    kind: Literal["migrate_kv"]


class ReplicateBody(PlaceBody):
    """Layers at one more place, which computes a part of each batch."""

    kind: Literal["replicate"]


class EvictBody(PlaceBody):
    """The replicas of layers leave a place."""

    kind: Literal["evict"]


class ResizeKVBody(_ActionBody):
    """The most bytes that new KV caches may hold: `limit` is bytes, text such as "4GiB", or "max"."""

    kind: Literal["resize_kv"]
    limit: Annotated[int, Field(ge=0, le=2**62)] | str
    place: str | None = None
    """None: the only place there is."""


AnyActionBody = Annotated[
    SwapBody | RestoreBody | ReleaseBody | ResizeKVBody | MigrateBody | MigrateKVBody | ReplicateBody | EvictBody,
    Field(discriminator="kind"),
]


class ActionsBody(_ActionBody):
    """`POST /elastic/actions`."""

    actions: Annotated[list[AnyActionBody], Field(min_length=1, max_length=100, fail_fast=True)]
    dry_run: bool = False


def closed() -> APIRouter:
    """Make the endpoints while actions are off: they tell how to open them."""
    router = APIRouter()

    @router.api_route("/elastic/actions", methods=["GET", "POST"], include_in_schema=False)
    async def off() -> None:
        raise APIError(404, "actions are off; start the server with --enable-actions and a token", code="not_found")

    return router


def routes(engine: Engine) -> APIRouter:
    """Make the endpoints."""
    router = APIRouter(route_class=JSONRoute)

    @router.get("/elastic/actions")
    async def kinds() -> dict[str, Any]:
        _runtime(engine)
        return {"kinds": dict(map(_described, get_args(get_args(AnyActionBody)[0])))}

    @router.post("/elastic/actions")
    async def act(body: ActionsBody) -> dict[str, Any]:
        runtime = _runtime(engine)
        try:
            return await asyncio.to_thread(_act, runtime, body)
        except CapacityError as error:
            raise APIError(409, str(error), code="capacity_exceeded") from error

    return router


def _runtime(engine: Engine) -> Runtime:
    """Return the engine's runtime. Raises `APIError` where there is none."""
    if engine.runtime is None:
        raise APIError(404, "the model of this server is not wrapped: there is nothing to act on", code="not_found")
    return engine.runtime


def _described(model: type[_ActionBody]) -> tuple[str, dict[str, Any]]:
    """Return the kind of an action, and its description for clients."""
    schema = model.model_json_schema()
    properties: dict[str, dict[str, Any]] = schema["properties"]
    kind: str = properties.pop("kind")["const"]
    return kind, {
        "what": " ".join(str(model.__doc__).split()),
        "fields": {name: {key: field[key] for key in field if key != "title"} for name, field in properties.items()},
        "required": [name for name in schema["required"] if name != "kind"],
    }


def _act(runtime: Runtime, body: ActionsBody) -> dict[str, Any]:
    """Plan the actions, or do them."""
    actions = [_action(asked, runtime) for asked in body.actions]
    if body.dry_run:
        steps = runtime.plan(actions)
        return {"dry_run": True, "steps": [{**plain(step), "action": with_kind(step.action)} for step in steps]}
    results = runtime.apply(actions, why=WHY)
    pairs = zip(actions, results, strict=True)
    return {"dry_run": False, "results": [{**plain(result), "action": with_kind(action)} for action, result in pairs]}


def _action(body: AnyActionBody, runtime: Runtime) -> Action:
    """Return the runtime's action. Raises `ConfigError`."""
    if isinstance(body, ResizeKVBody):
        place, places = body.place, [kv.place for kv in runtime.status().kv]
        if place is None and len(places) == 1:
            place = places[0]
        if place not in places:
            raise ConfigError(f"place={place!r}: choose one of {places}")
        return ResizeKV(str(place), parse_limit(body.limit, option="limit"))
    layers = tuple(runtime.at_home if body.layers is None else body.layers)
    count = runtime.status().layers
    wrong = [layer for layer in layers if not 0 <= layer < count]
    if wrong:
        raise ConfigError(f"layers={wrong[:10]}: the model has layers 0 to {count - 1}")
    match body:
        case SwapBody():
            return Swap(layers, body.variant, tuple(body.parts))
        case RestoreBody():
            return Restore(layers, tuple(body.parts))
        case ReleaseBody():
            return Release(layers)
        case MigrateBody():
            return Migrate(layers, body.place, tuple(body.parts))
        case MigrateKVBody():
            return MigrateKV(layers, body.place)
        case ReplicateBody():
            return Replicate(layers, body.place)
        case EvictBody():
            return Evict(layers, body.place)
