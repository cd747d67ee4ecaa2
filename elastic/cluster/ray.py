"""A fleet behind Ray Serve: Ray has the HTTP port, health checks and rolling restarts, a replica has the fleet.

Extra `ray`. Written against Ray 2.60.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.launch.ray import ROOM_S, RayLauncher
from elastic.errors import BackendUnavailable, StateError

try:
    from ray import serve
except ImportError as error:
    raise BackendUnavailable("elastic.cluster.ray needs Ray Serve: pip install 'elastic-llm[ray]'") from error

HEALTH_S = 5.0
DRAIN_S = 600.0
"""How long a replica that Ray ends may take to finish its answers: Ray's own 20 s would cut longer ones off."""
MOST_REQUESTS = 1024
"""How many requests a replica may have: with Ray's own 5 all others, for its health too, would wait at Ray's proxy."""


def deploy(
    model: str | Path,
    make_app: Callable[[Fleet], Any],
    *,
    ranks: int = 1,
    name: str = "elastic",
    route_prefix: str = "/",
    fleet: Mapping[str, Any] | None = None,
    launcher: Mapping[str, Any] | None = None,
    **deployment: Any,
) -> Any:
    """Serve a model behind Ray Serve, whose port it gets; returns Ray's handle of the deployment when it is healthy.

    Called again, it has Ray replace the replicas (`max_surge_percent=100`: a new one serves before the old one goes). A
    replica that Ray ends finishes the answers that it has, which may take `graceful_shutdown_timeout_s` (600); a new
    one waits longer than that for the room of the old one's ranks.

    `make_app(fleet)` returns the ASGI application of a replica: one that calls `elastic.server.create_app(fleet, …)`,
    which starts the fleet with itself and stops it at its end. `ranks` of the fleet are actors of Ray; `fleet` has
    further options of `Fleet`, `launcher` those of `RayLauncher`, `deployment` those of `ray.serve.deployment`. Each
    replica has a fleet of its own; Ray replaces one whose fleet has no rank left and gets none.
    `ray.serve.delete(name)` ends it, with its ranks.
    """
    path, fleet_options = os.path.abspath(model), dict(fleet or {})
    options = {
        "health_check_period_s": HEALTH_S,
        "graceful_shutdown_timeout_s": DRAIN_S,
        "max_ongoing_requests": MOST_REQUESTS,
        **deployment,
    }
    room_s = options["graceful_shutdown_timeout_s"] + ROOM_S
    launcher_options = {"ranks": ranks, "room_s": room_s, **(launcher or {})}

    fleets: list[Fleet] = []
    """Of a replica, in its process: both below go there together."""

    def build() -> Any:
        launch = RayLauncher(**launcher_options)
        fleets.append(Fleet(path, ranks=ranks, launch=launch, **fleet_options))
        return make_app(fleets[-1])

    class FleetFront:
        """What Ray asks of a replica of Ray Serve besides answers."""

        def check_health(self) -> None:
            """Raise `StateError` if the fleet takes no requests any more."""
            if not fleets[-1].serving:
                raise StateError("the fleet has no rank left, and none comes")

    ingress = serve.deployment(**options)(serve.ingress(build)(FleetFront))
    return serve.run(ingress.bind(), name=name, route_prefix=route_prefix)
