"""Whether an engine is a fleet. Nothing of `elastic.cluster` is imported to find out."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from elastic.engines.base import Engine

if TYPE_CHECKING:
    from elastic.cluster.fleet.fleet import Fleet


def as_fleet(engine: Engine) -> Fleet | None:
    """Return an engine as the fleet that it is, or None: a fleet has ranks to look at."""
    return cast("Fleet", engine) if hasattr(engine, "look") else None
