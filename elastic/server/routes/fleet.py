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

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter

from elastic.server.generation.state import ServerState
from elastic.server.protocol import fleet as bodies
from elastic.server.routes.acting import ActingRoutes

if TYPE_CHECKING:
    from elastic.cluster.fleet.fleet import Fleet

ANSWERS = ("cmpl-", "chatcmpl-", "resp_")
"""Beginnings of the ids of answers; what follows is the engine's id of the request."""
WHY = "by HTTP"
NO_FLEET = "this server has one model; elastic serve MODEL --ranks N makes a fleet"


def routes(serving: ServerState) -> APIRouter:
    """Make the endpoints."""
    fleet = ActingRoutes(serving.fleet, NO_FLEET)
    fleet.add("move", bodies.MoveBody, _move)
    fleet.add("add", bodies.AddBody, lambda fleet, body: {"added": fleet.add(tuple(body.places) or None)})
    fleet.add("remove", bodies.RemoveBody, _remove)
    fleet.add("plan", bodies.PlanBody, lambda fleet, body: {"offers": fleet.plan(body.need)})
    fleet.add("capacity", bodies.CapacityBody, lambda fleet, body: {"capacity": fleet.capacity(body.degrees)})
    fleet.add("drop", bodies.DropBody, lambda fleet, body: {"dropped": fleet.drop(why=WHY, **body.options)})
    fleet.add(
        "restore", bodies.RestoreGroupBody, lambda fleet, body: {"restored": fleet.restore(why=WHY, **body.options)}
    )
    fleet.add("reshard", bodies.ReshardBody, lambda fleet, body: {"resharded": fleet.reshard(why=WHY, **body.options)})
    fleet.add("migrate", bodies.MigrateGroupBody, lambda fleet, body: {"migrated": fleet.migrate(**body.options)})
    fleet.add(
        "replicate", bodies.ReplicateGroupBody, lambda fleet, body: {"replicated": fleet.replicate(**body.model_dump())}
    )
    fleet.add("evict", bodies.EvictGroupBody, lambda fleet, body: {"evicted": fleet.evict(body.home, body.layers)})
    fleet.add("merge", bodies.MergeBody, lambda fleet, body: {"merged": fleet.merge(*body.ranks)})
    fleet.add("split", bodies.SplitBody, lambda fleet, body: {"split": fleet.split(body.rank)})
    return fleet.router


def _move(fleet: Fleet, body: bodies.MoveBody) -> dict[str, Any]:
    request = body.request
    for prefix in ANSWERS:
        request = request.removeprefix(prefix)
    return {"moved": fleet.move(request, body.instance)}


def _remove(fleet: Fleet, body: bodies.RemoveBody) -> dict[str, Any]:
    fleet.remove(body.rank, drain=body.drain)
    return {"removed": body.rank, "end": None}
