"""States and actions from a document of `GET /elastic/status` of `elastic serve`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from elastic.bench.replay.timeline import ActionKey, EngineState, FinishedAction
from elastic.types import DROPPED


def parse_state(document: Mapping[str, Any], t_s: float) -> EngineState:
    """Return the state in a status document, of all ranks of a fleet together; `t_s` is the time of the replay."""
    traffic, counted = document["traffic"], document.get("token_layers")
    models = [model for model in _models(document) if model.get("state") not in ("lost", "ended")]
    told = [model["status"]["kv"] for model in models if model["status"]]
    caches = [kv for each in told for kv in each if kv.get("share", 1)]
    return EngineState(
        t_s,
        traffic["waiting"],
        traffic["running"],
        sum(kv["used_bytes"] for kv in caches) if caches else None,
        sum(kv["capacity_bytes"] for kv in caches) if caches else None,
        dict(Counter(layer for model in models for layer in model["layers"])),
        traffic["preemptions"],
        traffic["stalls"],
        {str(variant): int(count) for variant, count in counted.items()} if isinstance(counted, dict) else None,
    )


def parse_actions(document: Mapping[str, Any]) -> dict[ActionKey, FinishedAction]:
    """Return the actions in a status document, of a fleet and its ranks, too; `t_s` is of the epoch, by this clock."""
    late_s = time.time() - document["at_s"]
    actions = {
        (f"{model['name']}/{model['pid']}" if "pid" in model else "", event["id"]): _finished(event, late_s)
        for model in _models(document)
        for event in model["events"]
    }
    of_fleet = {("", event["id"]): _happened(event, late_s) for event in document.get("fleet_events", ())}
    return {**actions, **of_fleet}


def _models(document: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return what tells of a model: the ranks of a fleet, or else the document."""
    return document.get("ranks") or (document,)


def _happened(event: Mapping[str, Any], late_s: float) -> FinishedAction:
    """Return what happened to a fleet: its kind is that of the event, such as "dropped", "drop failed" or "lost"."""
    kind = event["kind"]
    return FinishedAction(
        t_s=event["when_s"] + late_s,
        kind=kind,
        reason=event.get("why", ""),
        layers=(),
        variant=None,
        bytes=event.get("moved_bytes", 0),
        released_bytes=0,
        prepare_ms=1e3 * event.get("seconds", 0.0),
        wait_ms=0.0,
        pause_ms=event.get("stalled_ms", 0.0),
        ok=not kind.endswith("failed"),
        outcome=kind,
    )


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
