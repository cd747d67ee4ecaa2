"""States and actions from a document of `GET /elastic/status` of `elastic serve`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from elastic.bench.replay.timeline import EngineState, FinishedAction
from elastic.types import DROPPED


def parse_state(document: Mapping[str, Any], t_s: float) -> EngineState:
    """Return the state in a status document; `t_s` is the time of the replay."""
    traffic, status, counted = document["traffic"], document["status"], document.get("token_layers")
    caches = [kv for kv in status["kv"] if kv.get("share", 1)] if status else None
    return EngineState(
        t_s,
        traffic["waiting"],
        traffic["running"],
        sum(kv["used_bytes"] for kv in caches) if caches else None,
        sum(kv["capacity_bytes"] for kv in caches) if caches else None,
        dict(Counter(document["layers"])),
        traffic["preemptions"],
        traffic["stalls"],
        {str(variant): int(count) for variant, count in counted.items()} if isinstance(counted, dict) else None,
    )


def parse_actions(document: Mapping[str, Any]) -> dict[int, FinishedAction]:
    """Return the actions in a status document by their numbers; `t_s` in seconds since the epoch by this clock."""
    late_s = time.time() - document["at_s"]
    return {event["id"]: _finished(event, late_s) for event in document["events"]}


def _finished(event: Mapping[str, Any], late_s: float) -> FinishedAction:
    action = event["action"]
    return FinishedAction(
        event["when_s"] + late_s,
        action["kind"],
        event["why"],
        tuple(action.get("layers", ())),
        {"release": "absent", "drop": DROPPED}.get(action["kind"], action.get("variant")),
        event["moved_bytes"],
        event["released_bytes"],
        event["prepare_ms"],
        event["wait_ms"],
        event["pause_ms"],
        event["ok"],
        event["outcome"],
    )
