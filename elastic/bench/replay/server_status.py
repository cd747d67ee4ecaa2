"""What `GET /elastic/status` of `elastic serve` says, as states and actions; other servers do not have it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from elastic.bench.replay.timeline import EngineState, FinishedRequest

TIMEOUT_S = 2.0


class ServerStatus:
    """Asks a server how it is; one that does not know when asked first is not asked again."""

    def __init__(self, httpx: Any, url: str, headers: Mapping[str, str]) -> None:
        self._errors = (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError)
        self._client = httpx.Client(headers=dict(headers), timeout=TIMEOUT_S)
        self._url = f"{url}/elastic/status"
        self.actions: dict[int, FinishedRequest] = {}
        """By their numbers, those of the last answer; `t_s` in seconds since the epoch by this machine's clock."""
        self._knows = True
        self._knows = self.observe(0.0) is not None

    def observe(self, t_s: float) -> EngineState | None:
        """The state now; None for a server that cannot say."""
        if not self._knows:
            return None
        try:
            document = self._client.get(self._url).raise_for_status().json()
            self.actions = parse_actions(document)
            return parse_state(document, t_s)
        except self._errors:
            return None

    def close(self) -> None:
        self._client.close()


def parse_state(document: Mapping[str, Any], t_s: float) -> EngineState:
    """The state in a status document."""
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


def parse_actions(document: Mapping[str, Any]) -> dict[int, FinishedRequest]:
    """The actions in a status document, on this machine's clock."""
    late_s = time.time() - document["at_s"]
    return {event["id"]: _done(event, late_s) for event in document["events"]}


def _done(event: Mapping[str, Any], late_s: float) -> FinishedRequest:
    action = event["action"]
    return FinishedRequest(
        event["when_s"] + late_s,
        action["kind"],
        event["why"],
        tuple(action.get("layers", ())),
        "absent" if action["kind"] == "release" else action.get("variant"),
        event["moved_bytes"],
        event["released_bytes"],
        event["prepare_ms"],
        event["wait_ms"],
        event["pause_ms"],
        event["ok"],
        event["outcome"],
    )
