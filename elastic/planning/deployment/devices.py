"""What is free on devices, and how busy they are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from elastic.errors import ConfigError

WINDOW_S = 120
"""Seconds over which a device's load is taken. (iServe, section 6)"""


@dataclass(frozen=True)
class Stage:
    """Some adjacent layers, and the devices whose ranks share them."""

    layers: range
    devices: tuple[str, ...]
    """As many as the tensor parallel degree."""
    nbytes: int
    """What each of them must have for its rank, room for keys and values counted."""


@dataclass(frozen=True)
class DeviceState:
    """A device as a planner sees it."""

    name: str
    free_bytes: int
    load: float = 0.0
    """The share of the last `WINDOW_S` in which it computed."""
    models: tuple[str, ...] = ()
    """That are on it already."""

    def __post_init__(self) -> None:
        if self.free_bytes < 0 or not 0 <= self.load < math.inf:
            raise ConfigError(f"{self} cannot be; its free bytes and its load are 0 or more")


def after(
    states: Iterable[DeviceState], stages: Sequence[Stage], busy: Sequence[float], model: str = ""
) -> tuple[DeviceState, ...]:
    """Return the devices with a model on them whose stages take their bytes, and that share of their time."""
    devices = {state.name: state for state in states}
    for stage, share in zip(stages, busy, strict=True):
        for name in stage.devices:
            state = devices[name]
            models = (*state.models, model) if model else state.models
            devices[name] = replace(
                state, free_bytes=state.free_bytes - stage.nbytes, load=state.load + share, models=models
            )
    return tuple(devices.values())


def overloaded(states: Sequence[DeviceState], stages: Sequence[Stage], busy: Sequence[float]) -> list[DeviceState]:
    """Return the devices that stages make compute more than all of their time, as they would be with them."""
    pairs = zip(states, after(states, stages, busy), strict=True)
    return [then for now, then in pairs if then.load > max(1.0, now.load)]
