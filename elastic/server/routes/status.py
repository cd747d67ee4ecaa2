"""The endpoints that only look: health, metrics, and everything of this moment in one JSON document.

`GET /elastic/status` is for `elastic top` and for other programs. The keys are stable; new ones may be added, and
`version` grows when one changes its meaning:

- `version`: 2
- `model`: the name that it is served under
- `state`: `"serving"`, `"draining"` (running requests are finished, new ones refused) or `"stopped"`
- `at_s`: seconds since the epoch; `uptime_s`: seconds since the server was made
- `traffic`: the fields of `elastic.controller.snapshot.RequestStats`; its quantiles are objects of `count`, `mean`,
  `p50`, `p95`, `p99`, in seconds, null while there are none
- `layers`: for each decoder layer the variant it is in, such as `"float32"` or `"int4"`, `"absent"` for a released one,
  `"dropped"` for a dropped one; empty for a model that is not wrapped
- `token_layers`: of all pairs of a token that was generated for a request over HTTP and a decoder layer, how many were
  computed in which variant
- `status`: the fields of `elastic.Status` (places with their owners, KV caches, residencies, host memory), or null
- `events`: the last actions, oldest first, at most 100: the fields of `elastic.Event`, where `action` is
  `{"kind": "swap", ...}` with the fields of the action; `kind` is `swap`, `restore`, `release`, `resize_kv`,
  `migrate`, `migrate_kv`, `replicate` or `evict`
- `controller`: what `health()` of the runtime says, or null where there is no controller

Of a fleet (since version 2), else empty:

- `ranks`: for each process the fields of `elastic.cluster.control.status.RankStatus`, `state` being `"starting"`,
  `"serving"`, `"flipping"` (it serves, and layers change their rank), `"draining"`, `"lost"` or `"ended"`; and under
  `layers`, `status`, `events`, `controller` and `traffic` what it last said of itself, as above; null or empty for one
  that never did; `times`: the fields of `elastic.engines.pipeline.turn.StageTimes`, `wires`: for each other rank those
  of `Wire`, and `utilization`: the share of two minutes in which its GPU was busy, null where nobody tells
- `instances`: the fields of `InstanceStatus`
- `fleet_events`: the last things that happened to it, oldest first, at most 100: the fields of `FleetEvent`
- `fleet`: `queued`, `totals` and `policy` of `FleetStatus`, or null

Where models are deployed by intents, `deployments` and `devices` are the fields of `DeploymentStatus` and
`DeviceStatus` (`elastic.cluster.deployment.status`); all other keys are of the server's own model.

The keys for one model are those of the rank where a fleet has one; where it has several, they are empty or null.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Response
from fastapi import Request as HTTPRequest
from fastapi.responses import JSONResponse

from elastic.controller.snapshot import RequestStats
from elastic.server.generation.collector import variants
from elastic.server.generation.state import ServerState
from elastic.server.protocol.errors import RETRY_AFTER_S
from elastic.server.routes import STATUS_VERSION
from elastic.server.routes.catalogue import Catalogue
from elastic.types import KINDS, Event, Fetch, Status

if TYPE_CHECKING:
    from elastic.cluster.fleet.fleet import Fleet

EVENTS_SHOWN = 100


def routes(models: Catalogue) -> APIRouter:
    """Make the endpoints. Those that read the runtime run in threads: it may be busy for a moment."""
    router, serving = APIRouter(), models.own

    @router.get("/health")
    async def health() -> Response:
        body: dict[str, Any] = {"status": serving.state}
        ok = serving.state == "serving"
        if serving.fleet is not None:
            ranks = serving.fleet.status().ranks
            body["ranks"] = [{"name": rank.name, "state": rank.state} for rank in ranks]
            ok = ok and any(rank.serves for rank in ranks)
        headers = {} if ok else {"Retry-After": str(RETRY_AFTER_S)}
        return JSONResponse(body, 200 if ok else 503, headers)

    @router.get("/metrics")
    def metrics(http: HTTPRequest) -> Response:
        others = [each.metrics for each in models.all()[1:]]
        body, content_type = serving.metrics.render(http.headers.get("accept", ""), others)
        return Response(body, headers={"Content-Type": content_type})

    @router.get("/elastic/status")
    def status() -> Response:
        told = document(serving)
        if models.deployments is not None:
            deployed = {"deployments": models.deployments.status(), "devices": models.deployments.devices()}
            told |= {key: plain(value) for key, value in deployed.items()}
        return JSONResponse(told)

    return router


def document(serving: ServerState) -> dict[str, Any]:
    """Return the status document of a server."""
    runtime = serving.engine.runtime
    ranks = _ranks(serving)
    if runtime is not None:
        model = about_model(runtime.status(), runtime.events(), runtime.health())
    elif len(ranks) == 1:
        model = {key: ranks[0][key] for key in _NOTHING}
    else:
        model = _NOTHING
    traffic = serving.engine.counters.read()
    about = about_server(serving.name, serving.state, serving.since_s, traffic, serving.token_layers())
    return {**about, **model, "ranks": ranks, **_of_fleet(serving.fleet)}


def about_server(
    name: str, state: str, since_s: float, traffic: RequestStats, token_layers: Mapping[str, int]
) -> dict[str, Any]:
    """Return the keys of the document that are not of its model."""
    now = time.time()
    return {
        "version": STATUS_VERSION,
        "model": name,
        "state": state,
        "at_s": now,
        "uptime_s": now - since_s,
        "traffic": plain(traffic),
        "token_layers": token_layers,
    }


_NOTHING: dict[str, Any] = {"layers": [], "status": None, "events": [], "controller": None}


def about_model(status: Status, events: Sequence[Event], controller: Any) -> dict[str, Any]:
    """Return the keys of the document that are of a model."""
    return {
        "layers": variants(status),
        "status": plain(status),
        "events": [{**plain(event), "action": with_kind(event.action)} for event in events[-EVENTS_SHOWN:]],
        "controller": plain(controller),
    }


def _ranks(serving: ServerState) -> list[dict[str, Any]]:
    """Return what there is to say of each rank."""
    if serving.ranks is None:
        return []
    views = serving.ranks.read()
    ranks = []
    for rank in serving.ranks.fleet.status().ranks:
        view = views.get(rank.name)
        model = _NOTHING if view is None else about_model(view.status, view.events, view.controller)
        told = {"traffic": "stats", "times": "times", "wires": "wires", "utilization": "utilization"}
        of_view = {key: None if view is None else plain(getattr(view, name)) for key, name in told.items()}
        ranks.append({**plain(rank), **model, **of_view})
    return ranks


def _of_fleet(fleet: Fleet | None) -> dict[str, Any]:
    if fleet is None:
        return {"instances": [], "fleet_events": [], "fleet": None}
    status = fleet.status()
    return {
        "instances": plain(status.instances),
        "fleet_events": plain(fleet.events()[-EVENTS_SHOWN:]),
        "fleet": {"queued": status.queued, "totals": plain(status.totals), "policy": status.policy},
    }


def with_kind(action: Any) -> dict[str, Any]:
    """Return one action as JSON, with its kind; of a fetch only that, and the layers."""
    told = {"layers": list(action.layers)} if isinstance(action, Fetch) else plain(action)
    return {"kind": KINDS.get(type(action), type(action).__name__.lower()), **told}


def plain(value: Any) -> Any:
    """Return records, enums and containers as JSON; what is no finite number is null, what is unknown its text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, range):
        return list(value)
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)
