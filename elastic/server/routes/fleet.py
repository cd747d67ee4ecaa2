"""`/elastic/fleet`: requests between instances, ranks that come and go. For holders of the token of actions.

`POST /elastic/fleet/move {"request", "instance"}`: the request is the id of an answer, such as `chatcmpl-…`.
`POST /elastic/fleet/add {"places": […]}`, `POST /elastic/fleet/remove {"rank", "drain"}`.
`POST /elastic/fleet/plan {"need": "24MiB"}`: what could give so many bytes to requests that wait, and its price.
`POST /elastic/fleet/capacity {"degrees": [1, 2, 4]}`: the blocks of the longest request, of each rank by how many like
it share layers: `{"capacity": {"r0": {"1": 44, "2": 162}}}`. What layers are not cut for is left out.
`POST /elastic/fleet/drop {"need": "24MiB"}` or `{"layers": {"r0": [6, 7], "r1": [0, 1]}}`, with `"dry_run"` its plan;
`POST /elastic/fleet/restore {"rank", "sharing"}` (without a rank: all; sharing: see `Fleet.restore`),
`.../merge {"ranks": […]}`, `.../split {"rank"}`;
`POST /elastic/fleet/reshard {"instances": ["r0", "r1"], "tp": 2}`.
`POST /elastic/fleet/migrate {"home": "r0", "layers": [4, 5], "rank": "r1"}`, `.../replicate` alike,
`.../evict {"home", "layers"}` (without layers: all of the instance's replicas).
Drops, restores, reshards, migrations and replicas have a price with `"dry_run"`, and nothing is done; all but replicas
take `"exchange"`, `"coordinated"`, `"layers_per_step"` and `"timeout_s"`, too, a drop `"whole"` and `"most"`: see
`Fleet.drop`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from elastic.server.fleets.fleet import FleetEngine
from elastic.server.generation.state import ServerState
from elastic.server.protocol.errors import APIError
from elastic.server.routes.acting import ActingRoute, act
from elastic.server.routes.status import plain

ANSWERS = ("cmpl-", "chatcmpl-", "resp_")
"""Beginnings of the ids of answers; what follows is the engine's id of the request."""
Name = Annotated[str, Field(min_length=1, max_length=200)]
Layers = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=10_000, fail_fast=True)]
WHY = "by HTTP"
MOST_S = 600.0
"""How long live requests may take, at the most, to fit in what is left while layers change their rank."""
NO_FLEET = "this server has one model; elastic serve MODEL --ranks N makes a fleet"


class _FleetBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class MoveBody(_FleetBody):
    """A request that is to go on at another instance."""

    request: Name
    instance: Name


class AddBody(_FleetBody):
    """One more rank; without `places`, as the fleet chooses."""

    places: Annotated[list[Name], Field(max_length=100, fail_fast=True)] = []


class RemoveBody(_FleetBody):
    """A rank that is to end. Its requests go on elsewhere; with `drain`, it ends when they have."""

    rank: Name
    drain: bool = True


class _ExchangeBody(_FleetBody):
    """How layers change their rank."""

    exchange: Literal["live", "stall"] = "live"
    coordinated: bool = True
    layers_per_step: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    timeout_s: Annotated[float, Field(gt=0, le=MOST_S)] | None = None

    @property
    def form(self) -> dict[str, Any]:
        """The options of `Fleet.drop` that say it."""
        patience = {} if self.timeout_s is None else {"timeout_s": self.timeout_s}
        return {name: getattr(self, name) for name in ("exchange", "coordinated", "layers_per_step")} | patience


Size = Annotated[int, Field(ge=1, lt=2**63)] | Name
"""Bytes, or text such as 24MiB."""


class PlanBody(_FleetBody):
    """So many bytes of KV that requests lack."""

    need: Size


class CapacityBody(_FleetBody):
    """Numbers of ranks that could share layers."""

    degrees: Annotated[
        list[Annotated[int, Field(ge=1, le=1024)]], Field(min_length=1, max_length=100, fail_fast=True)
    ] = [1, 2, 4]


class DropBody(_ExchangeBody):
    """Layers that are to leave: so many bytes of them, or those of each rank."""

    need: Size | None = None
    layers: Annotated[dict[Name, Layers], Field(max_length=1000)] | None = None
    whole: bool = False
    most: Annotated[int, Field(ge=2, lt=2**31)] | None = None
    dry_run: bool = False


class RestoreGroupBody(_ExchangeBody):
    """A rank of the group whose layers are to return; without it, all groups."""

    rank: Name | None = None
    dry_run: bool = False
    sharing: bool = False


class ReshardBody(_ExchangeBody):
    """Instances whose ranks are to share every layer, `tp` of them each."""

    instances: Annotated[list[Name], Field(min_length=1, max_length=1000, fail_fast=True)]
    tp: Annotated[int, Field(ge=1, le=1024)]
    dry_run: bool = False


class MigrateGroupBody(_ExchangeBody):
    """Layers of an instance that another rank is to compute."""

    home: Name
    layers: Annotated[Layers, Field(min_length=1)]
    rank: Name
    dry_run: bool = False


class ReplicateGroupBody(_FleetBody):
    """Layers of an instance that another rank is to compute too, for half of its requests."""

    home: Name
    layers: Annotated[Layers, Field(min_length=1)]
    rank: Name
    dry_run: bool = False


class EvictGroupBody(_FleetBody):
    """Layers of an instance that are to have no replica; without `layers`, all."""

    home: Name
    layers: Annotated[Layers, Field(min_length=1)] | None = None


class MergeBody(_FleetBody):
    """Ranks that are to be able to compute each other's layers."""

    ranks: Annotated[list[Name], Field(min_length=2, max_length=1000, fail_fast=True)]


class SplitBody(_FleetBody):
    """A rank of the group that is to part."""

    rank: Name


Done = Callable[[Callable[[FleetEngine], dict[str, Any]]], Awaitable[dict[str, Any]]]
"""Has a fleet do something, and waits for it."""


def routes(serving: ServerState) -> APIRouter:
    """Make the endpoints."""
    router = APIRouter(route_class=ActingRoute)

    @router.post("/elastic/fleet/move")
    async def move(body: MoveBody) -> dict[str, Any]:
        request = body.request
        for prefix in ANSWERS:
            request = request.removeprefix(prefix)
        return await done(lambda fleet: {"moved": plain(fleet.move(request, body.instance))})

    @router.post("/elastic/fleet/add")
    async def add(body: AddBody) -> dict[str, Any]:
        return await done(lambda fleet: {"added": plain(fleet.add(tuple(body.places) or None))})

    @router.post("/elastic/fleet/remove")
    async def remove(body: RemoveBody) -> dict[str, Any]:
        return await done(lambda fleet: {"removed": body.rank, "end": plain(fleet.remove(body.rank, drain=body.drain))})

    @router.post("/elastic/fleet/plan")
    async def plan(body: PlanBody) -> dict[str, Any]:
        return await done(lambda fleet: {"offers": plain(fleet.plan(body.need))})

    @router.post("/elastic/fleet/capacity")
    async def capacity(body: CapacityBody) -> dict[str, Any]:
        return await done(lambda fleet: {"capacity": plain(fleet.capacity(body.degrees))})

    async def done(work: Callable[[FleetEngine], dict[str, Any]]) -> dict[str, Any]:
        if serving.fleet is None:
            raise APIError(404, NO_FLEET, code="not_found")
        return await act(partial(work, serving.fleet))

    _add_layer_routes(router, done)
    return router


def _add_layer_routes(router: APIRouter, done: Done) -> None:
    """Add those for layers that other ranks compute."""

    @router.post("/elastic/fleet/drop")
    async def drop(body: DropBody) -> dict[str, Any]:
        given = {name: value for name in ("whole", "most") if (value := getattr(body, name))}
        options = {"layers": body.layers, "dry_run": body.dry_run, "why": WHY, **given, **body.form}
        return await done(lambda fleet: {"dropped": plain(fleet.drop(body.need, **options))})

    @router.post("/elastic/fleet/restore")
    async def restore(body: RestoreGroupBody) -> dict[str, Any]:
        given = {"sharing": True} if body.sharing else {}
        options = {"dry_run": body.dry_run, "why": WHY, **given, **body.form}
        return await done(lambda fleet: {"restored": plain(fleet.restore(body.rank, **options))})

    @router.post("/elastic/fleet/reshard")
    async def reshard(body: ReshardBody) -> dict[str, Any]:
        options = {"tp": body.tp, "dry_run": body.dry_run, "why": WHY, **body.form}
        return await done(lambda fleet: {"resharded": plain(fleet.reshard(body.instances, **options))})

    @router.post("/elastic/fleet/migrate")
    async def migrate(body: MigrateGroupBody) -> dict[str, Any]:
        given = (body.home, body.layers, body.rank)
        return await done(lambda fleet: {"migrated": plain(fleet.migrate(*given, dry_run=body.dry_run, **body.form))})

    @router.post("/elastic/fleet/replicate")
    async def replicate(body: ReplicateGroupBody) -> dict[str, Any]:
        return await done(lambda fleet: {"replicated": plain(fleet.replicate(**body.model_dump()))})

    @router.post("/elastic/fleet/evict")
    async def evict(body: EvictGroupBody) -> dict[str, Any]:
        return await done(lambda fleet: {"evicted": plain(fleet.evict(body.home, body.layers))})

    @router.post("/elastic/fleet/merge")
    async def merge(body: MergeBody) -> dict[str, Any]:
        return await done(lambda fleet: {"merged": plain(fleet.merge(*body.ranks))})

    @router.post("/elastic/fleet/split")
    async def split(body: SplitBody) -> dict[str, Any]:
        return await done(lambda fleet: {"split": plain(fleet.split(body.rank))})
