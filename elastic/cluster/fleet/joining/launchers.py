"""Launchers by name. Their modules are imported when they are asked for: some need packages that few have."""

from __future__ import annotations

import importlib

from elastic.cluster.launch.base import Launcher
from elastic.config import require
from elastic.errors import ConfigError

_LAUNCHERS = {
    "local": "elastic.cluster.launch.local:LocalLauncher",
    "in-process": "elastic.cluster.launch.in_process:InProcessLauncher",
    "ray": "elastic.cluster.launch.ray:RayLauncher",
}


def launcher_of(launch: str | Launcher, ranks: int) -> Launcher:
    """Return a launcher, by its name or as it is, for so many ranks at first. Raises `ConfigError` for what is none.

    Local ones share the cores among them; Ray places them together.
    """
    if not isinstance(launch, str):
        is_launcher = all(hasattr(launch, name) for name in ("name", "start", "close"))
        require(is_launcher, "launch", launch, f"one of {', '.join(_LAUNCHERS)}, or a `Launcher`")
        return launch
    if launch == "join":
        raise ConfigError("launch='join' needs a key: give elastic.cluster.launch.join.JoinLauncher(key_file, ...)")
    if launch not in _LAUNCHERS:
        raise ConfigError(f"launch={launch!r} must be one of {', '.join(_LAUNCHERS)}, or a launcher")
    module, name = _LAUNCHERS[launch].split(":")
    options = {"ranks": ranks} if launch in ("local", "ray") else {}
    made: Launcher = getattr(importlib.import_module(module), name)(**options)
    return made
