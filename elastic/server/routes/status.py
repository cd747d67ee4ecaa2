"""The endpoints that only look: health, metrics, and everything of this moment in one JSON document.

`GET /elastic/status` is for `elastic top` and for other programs. The keys are stable; new ones may be added, and
`version` grows when one changes its meaning:

- `version`: 1
- `model`: the name that it is served under
- `state`: `"serving"`, `"draining"` (running requests are finished, new ones refused) or `"stopped"`
- `at_s`: seconds since the epoch; `uptime_s`: seconds since the server was made
- `traffic`: the fields of `elastic.controller.snapshot.RequestStats`; its quantiles are objects of `count`, `mean`,
  `p50`, `p95`, `p99`, in seconds, null while there are none
- `layers`: for each decoder layer the variant it is in, such as `"float32"` or `"int4"`, `"absent"` for a released one;
  empty for a model that is not wrapped
- `token_layers`: of all pairs of a token that was generated for a request over HTTP and a decoder layer, how many were
  computed in which variant
- `status`: the fields of `elastic.Status` (places with their owners, KV caches, residencies, host memory), or null
- `events`: the last actions, oldest first, at most 100: the fields of `elastic.Event`, where `action` is
  `{"kind": "swap", ...}` with the fields of the action; `kind` is `swap`, `restore`, `release`, `resize_kv`,
  `migrate`, `migrate_kv`, `replicate` or `evict`
- `controller`: what `health()` of the runtime says, or null where there is no controller
"""

from __future__ import annotations

import math
import time
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HTTPRequest
from fastapi.responses import JSONResponse

from elastic.server.generation.collector import variants
from elastic.server.generation.state import ServerState
from elastic.server.protocol.errors import RETRY_AFTER_S
from elastic.server.routes import STATUS_VERSION
from elastic.types import KINDS

EVENTS_SHOWN = 100


def routes(serving: ServerState) -> APIRouter:
    """Make the endpoints. Those that read the runtime run in threads: it may be busy for a moment."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        ok = serving.state == "serving"
        headers = {} if ok else {"Retry-After": str(RETRY_AFTER_S)}
        return JSONResponse({"status": serving.state}, 200 if ok else 503, headers)

    @router.get("/metrics")
    def metrics(http: HTTPRequest) -> Response:
        body, content_type = serving.metrics.render(http.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})

    @router.get("/elastic/status")
    def status() -> Response:
        return JSONResponse(document(serving))

    return router


def document(serving: ServerState) -> dict[str, Any]:
    """Return the status document of a server."""
    engine = serving.engine
    runtime = engine.runtime
    status = runtime.status() if runtime else None
    events = (runtime.events() if runtime else ())[-EVENTS_SHOWN:]
    now = time.time()
    return {
        "version": STATUS_VERSION,
        "model": serving.name,
        "state": serving.state,
        "at_s": now,
        "uptime_s": now - serving.since_s,
        "traffic": plain(engine.counters.read()),
        "layers": variants(status) if status else [],
        "token_layers": serving.token_layers(),
        "status": plain(status),
        "events": [{**plain(event), "action": with_kind(event.action)} for event in events],
        "controller": plain(runtime.health()) if runtime else None,
    }


def with_kind(action: Any) -> dict[str, Any]:
    """Return one action as JSON, with its kind."""
    return {"kind": KINDS.get(type(action), type(action).__name__.lower()), **plain(action)}


def plain(value: Any) -> Any:
    """Return records, enums and containers as JSON; what is no finite number is null, what is unknown its text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)
