"""The fields of actions, checked before anything is done: they come from other programs and hosts too."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from elastic.errors import require, require_flag
from elastic.types import Action, WeightsSource

SEVERAL: Mapping[str, tuple[type, str]] = {
    "parts": (str, "a list of names inside the layers"),
    "shards": (object, "a list of their numbers"),
    "sources": (WeightsSource, "a list of what rt.weights_source returned"),
}
"""Fields that hold several things: of which type, and in words."""


def listed(value: Any, name: str) -> tuple[Any, ...]:
    """Return what a field of `SEVERAL` is given, as a tuple. Raises `ConfigError` for anything else."""
    kind, allowed = SEVERAL[name]
    several = isinstance(value, Collection) and not isinstance(value, str | bytes)
    require(several and all(isinstance(each, kind) for each in value), name, value, allowed)
    return tuple(value)


def well_formed(action: Any) -> Any:
    """Return an action with tuples where it has lists. Raises `ConfigError` for a field of another type.

    What is no action is returned as it is: who does actions says which there are.
    """
    if not isinstance(action, Action):
        return action
    place = getattr(action, "place", "")
    require(isinstance(place, str), "place", place, "the name of a place")
    require_flag(getattr(action, "after_restore", False), "after_restore")
    several: dict[str, Any] = {name: listed(getattr(action, name), name) for name in SEVERAL if hasattr(action, name)}
    return replace(action, **several)
