"""`/elastic/actions`: what can be done to a running model, what it would do, and doing it.

`GET` lists the kinds. `POST {"actions": [{"kind": "swap", "layers": [3, 4], "variant": "int4"}], "dry_run": true}`
answers with the steps of a plan; without `dry_run`, with the results, once the actions are committed: all, or none.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from elastic.config import parse_limit
from elastic.engines.base import Engine
from elastic.errors import CapacityError, ConfigError
from elastic.runtime.runtime import Runtime
from elastic.server.generation.bodies import JSONRoute
from elastic.server.generation.errors import APIError
from elastic.server.routes.status import action as as_json
from elastic.server.routes.status import plain
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


Asked = Annotated[
    SwapBody | RestoreBody | ReleaseBody | ResizeKVBody | MigrateBody | MigrateKVBody | ReplicateBody | EvictBody,
    Field(discriminator="kind"),
]


class ActionsBody(_ActionBody):
    """`POST /elastic/actions`."""

    actions: Annotated[list[Asked], Field(min_length=1, max_length=100, fail_fast=True)]
    dry_run: bool = False


def closed() -> APIRouter:
    """What stands there while actions are off: how to open them."""
    router = APIRouter()

    @router.api_route("/elastic/actions", methods=["GET", "POST"], include_in_schema=False)
    async def off() -> None:
        raise APIError(404, "actions are off; start the server with --enable-actions and a token", code="not_found")

    return router


def routes(engine: Engine) -> APIRouter:
    """The endpoints."""
    router = APIRouter(route_class=JSONRoute)

    @router.get("/elastic/actions")
    async def kinds() -> dict[str, Any]:
        _runtime(engine)
        return {"kinds": {_kind(model): _what_it_takes(model) for model in _MODELS}}

    @router.post("/elastic/actions")
    async def act(body: ActionsBody) -> dict[str, Any]:
        runtime = _runtime(engine)
        try:
            return await asyncio.to_thread(_act, runtime, body)
        except CapacityError as error:
            raise APIError(409, str(error), code="capacity_exceeded") from error

    return router


_MODELS: tuple[type[_ActionBody], ...] = (
    SwapBody,
    RestoreBody,
    ReleaseBody,
    ResizeKVBody,
    MigrateBody,
    MigrateKVBody,
    ReplicateBody,
    EvictBody,
)
_AT_PLACES: dict[type[PlaceBody], type[MigrateKV | Replicate | Evict]] = {
    MigrateKVBody: MigrateKV,
    ReplicateBody: Replicate,
    EvictBody: Evict,
}


def _runtime(engine: Engine) -> Runtime:
    if engine.runtime is None:
        raise APIError(404, "the model of this server is not wrapped: there is nothing to act on", code="not_found")
    return engine.runtime


def _act(runtime: Runtime, body: ActionsBody) -> dict[str, Any]:
    actions = [_action(asked, runtime) for asked in body.actions]
    if body.dry_run:
        steps = runtime.plan(actions)
        return {"dry_run": True, "steps": [{**plain(step), "action": as_json(step.action)} for step in steps]}
    results = runtime.apply(actions, why=WHY)
    pairs = zip(actions, results, strict=True)
    return {"dry_run": False, "results": [{**plain(result), "action": as_json(action)} for action, result in pairs]}


def _action(asked: Asked, runtime: Runtime) -> Action:
    """The runtime's action. Raises `ConfigError`."""
    if isinstance(asked, ResizeKVBody):
        return ResizeKV(_place(asked.place, runtime), parse_limit(asked.limit, option="limit"))
    layers = tuple(runtime.at_home if asked.layers is None else asked.layers)
    count = runtime.status().layers
    wrong = [layer for layer in layers if not 0 <= layer < count]
    if wrong:
        raise ConfigError(f"layers={wrong[:10]}: the model has layers 0 to {count - 1}")
    if isinstance(asked, ReleaseBody):
        return Release(layers)
    if isinstance(asked, PlaceBody):
        return _AT_PLACES[type(asked)](layers, asked.place)
    parts = tuple(asked.parts)
    if isinstance(asked, MigrateBody):
        return Migrate(layers, asked.place, parts)
    return Swap(layers, asked.variant, parts) if isinstance(asked, SwapBody) else Restore(layers, parts)


def _place(name: str | None, runtime: Runtime) -> str:
    places = [kv.place for kv in runtime.status().kv]
    if name is None and len(places) == 1:
        return places[0]
    if name not in places:
        raise ConfigError(f"place={name!r}: choose one of {places}")
    return str(name)


def _kind(model: type[_ActionBody]) -> str:
    kind: str = model.model_json_schema()["properties"]["kind"]["const"]
    return kind


def _what_it_takes(model: type[_ActionBody]) -> dict[str, Any]:
    schema = model.model_json_schema()
    fields = {name: _of_field(field) for name, field in schema["properties"].items() if name != "kind"}
    required = [name for name in schema["required"] if name != "kind"]
    return {"what": " ".join(str(model.__doc__).split()), "fields": fields, "required": required}


def _of_field(field: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in field.items() if key != "title"}
