"""What tests ask Ray, and a server that it may have started."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from ray.util.placement_group import placement_group_table

SERVE_URL = "http://127.0.0.1:8000"
"""Where Ray Serve listens unless it is told otherwise."""


def groups() -> list[str]:
    """The placement groups that hold or wait for room."""
    return [name for name, facts in placement_group_table().items() if facts["state"] != "REMOVED"]


def asked(path: str, body: dict[str, Any] | None = None, at: str | None = SERVE_URL) -> Any:
    """What a server answers, as JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{at}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)
