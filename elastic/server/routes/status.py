"""`GET /elastic/status`: everything of this moment in one JSON document, for `elastic top` and for other programs.

The keys are stable; new ones may be added, and `version` grows when one changes its meaning:

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
from typing import TYPE_CHECKING, Any

from elastic.runtime.runtime import Runtime
from elastic.server.generation.collector import variants
from elastic.types import KINDS, Event

if TYPE_CHECKING:
    from elastic.server.generation.state import ServerState

VERSION = 1
EVENTS_SHOWN = 100


def document(serving: ServerState) -> dict[str, Any]:
    """The document of a server."""
    engine = serving.engine
    runtime = engine.runtime
    status = runtime.status() if runtime else None
    now = time.time()
    return {
        "version": VERSION,
        "model": serving.name,
        "state": serving.state,
        "at_s": now,
        "uptime_s": now - serving.since_s,
        "traffic": plain(engine.counters.read()),
        "layers": variants(status) if status else [],
        "token_layers": serving.work.by_variant(engine.weights),
        "status": plain(status),
        "events": [event(e) for e in (runtime.events() if runtime else ())[-EVENTS_SHOWN:]],
        "controller": _health(runtime),
    }


def event(happened: Event) -> dict[str, Any]:
    """One event as JSON."""
    return {**plain(happened), "action": action(happened.action)}


def action(asked: Any) -> dict[str, Any]:
    """One action as JSON, with its kind."""
    return {"kind": KINDS.get(type(asked), type(asked).__name__.lower()), **plain(asked)}


def plain(value: Any) -> Any:
    """What JSON can say of records, enums and containers; what is no number is null, what is unknown its text."""
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


def _health(runtime: Runtime | None) -> Any:
    health = getattr(runtime, "health", None)
    return plain(health() if callable(health) else health)
