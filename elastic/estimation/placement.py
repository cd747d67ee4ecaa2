"""Several models on devices, one after another, each where those before it have left room. (iServe, section 6)"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elastic.errors import ConfigError, is_number, require
from elastic.estimation.device_list import parse_devices
from elastic.estimation.estimate import WEIGHTS, Estimator
from elastic.estimation.model_layout import layout_of
from elastic.estimation.options import ModelOption, options
from elastic.planning.deployment.devices import DeviceState, after
from elastic.planning.deployment.placing import Deployment, Refusal, place
from elastic.planning.deployment.policies import THETA, PolicyName
from elastic.planning.estimate.configuration import FULL
from elastic.planning.estimate.devices import Device
from elastic.planning.estimate.intent import Intent, Objective
from elastic.planning.estimate.performance import Load


@dataclass(frozen=True)
class ModelSpace:
    """What is considered of each model."""

    load: Load
    intent: Intent | Objective = "cost"
    weights: Sequence[str] = WEIGHTS
    kv: Sequence[str] = (FULL,)
    planned: bool = False
    """Also what this version cannot run."""
    losses: Mapping[str, float] | None = None
    """By how much each form raises the mean loss of a token, by name."""
    step_tokens: int = 512
    block_tokens: int | None = None
    """Of the engine; None: as it has them where nobody has chosen them."""
    any_model: bool = False
    """Take also models that the engine refuses, for their shapes."""

    def options(self, model: Any, devices: Sequence[Device]) -> tuple[ModelOption, ...]:
        """Return a model's configurations on devices, ranked. Raises `ConfigError` for what cannot be estimated."""
        layout = layout_of(model, torch.float32 if devices[0].kind.type == "cpu" else None)
        sizes = self.step_tokens, self.block_tokens
        estimator = Estimator(
            layout,
            devices,
            self.load,
            *sizes,
            planned=self.planned,
            losses=self.losses or {},
            any_model=self.any_model,
        )
        return options(estimator, self.intent, self.weights, self.kv)


@dataclass(frozen=True)
class PlacedModels:
    """What became of each model, and of the devices."""

    models: tuple[tuple[str, Deployment | Refusal], ...]
    """By names that are unique, in the order in which they were placed."""
    states: tuple[DeviceState, ...]
    """What is left of the devices, and the load to be expected."""
    basis: str
    """Where the seconds are from."""


def numbered(names: Sequence[str]) -> tuple[str, ...]:
    """Return names that are unlike: what is there again gets a number, from 2 on, that none of them has."""
    numbers = {name: itertools.count(2) for name in names}
    unlike: list[str] = []
    for name in names:
        others = (f"{name}#{number}" for number in numbers[name])
        unlike.append(next(other for other in others if other not in numbers) if name in unlike else name)
    return tuple(unlike)


def place_models(
    models: Mapping[str, Any],
    devices: str | Sequence[str | Device],
    space: ModelSpace,
    *,
    policy: PolicyName = "hybrid",
    theta: float = THETA,
    loads: Mapping[str, float] | None = None,
    kind: str | None = None,
) -> PlacedModels:
    """Place models, each a directory, a config or a model, in their order.

    `loads`: how busy devices are before, by name. A model that has no place is passed over, with the reasons. Raises
    `ConfigError` for what cannot be estimated, and for a load of an unknown device.
    """
    parsed = parse_devices(devices, kind)
    names = {device.name for device in parsed}
    if unknown := sorted(set(loads or {}) - names):
        raise ConfigError(f"loads of {', '.join(unknown)}, which are none of the devices {', '.join(sorted(names))}")
    for name, load in (loads or {}).items():
        require(is_number(load) and load >= 0, f"loads: {name}", load, "a share of the time, 0 or more")
    states = tuple(DeviceState(each.name, each.memory_bytes, (loads or {}).get(each.name, 0.0)) for each in parsed)
    ranked: dict[Any, tuple[ModelOption, ...]] = {}
    placed: list[tuple[str, Deployment | Refusal]] = []
    for name, model in models.items():
        key = model if isinstance(model, str) else id(model)
        if key not in ranked:
            ranked[key] = space.options(model, parsed)
        outcome = place(ranked[key], states, policy, theta)
        placed.append((name, outcome))
        if isinstance(outcome, Deployment):
            states = after(states, outcome.stages, outcome.busy, name)
    return PlacedModels(tuple(placed), states, next(iter(ranked.values()))[0].estimate.basis if ranked else "")
