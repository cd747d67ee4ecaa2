"""Models that are deployed one after another on the devices of a cluster, while requests are served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from elastic.cluster.deployment.devices import DeviceBook
from elastic.estimation.options import ModelOption
from elastic.estimation.placement import ModelSpace, numbered
from elastic.planning.deployment.placing import Deployment, Refusal, place
from elastic.planning.deployment.policies import THETA, PolicyName
from elastic.planning.estimate.devices import Device
from elastic.sim.core.clock import VirtualClock
from elastic.sim.core.host import ComputeTurn, SharedHost
from elastic.sim.core.instance import EngineOptions
from elastic.sim.placement.fleet import PlacedFleet

TICK_S = 1.0
"""Between two looks at how long ranks have computed, as of `Replanning`."""


@dataclass(frozen=True)
class PlacementScenario:
    """Models that are to be placed, and on what."""

    devices: Sequence[Device]
    configs: Mapping[str, Any]
    """Directories, or configs, by the name of the model."""
    order: Sequence[str]
    """Names of configs, in the order in which models are deployed; one may be there several times."""
    space: ModelSpace
    """Of each model."""
    policy: PolicyName = "hybrid"
    theta: float = THETA
    replicas: int = 1
    together: int | None = None
    """So many are deployed at a time, `every_s` apart; None: all at once."""
    every_s: float = 0.0
    engine: EngineOptions = field(default_factory=EngineOptions)
    noise: float = 0.0
    stretch_s: float = 0.0
    """See `RankModel`."""
    basis: str = "data sheet"
    """Where the seconds of steps are from."""

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each model that is deployed, in order: those of one config are numbered from the second on."""
        return numbered(self.order)


class SimulatedDeployments:
    """Has models come to devices, each placed by what is free there and by how busy they were in the last minutes."""

    def __init__(self, clock: VirtualClock, scenario: PlacementScenario, seed: int) -> None:
        self.scenario, self.seed = scenario, seed
        self.book = DeviceBook(scenario.devices)
        self.outcomes: dict[str, Deployment | Refusal] = {}
        """Of each model that was deployed by now."""
        self.fleets: dict[str, PlacedFleet] = {}
        """Of those that have a place."""
        self._clock = clock
        self._turns = {device.name: ComputeTurn(SharedHost(clock)) for device in scenario.devices}
        self._options: dict[str, tuple[ModelOption, ...]] = {}
        self._refusals: dict[str, str] = {}
        names = scenario.names
        self._last_s = 0.0
        for number, (name, config) in enumerate(zip(names, scenario.order, strict=True)):
            self._last_s = number // (scenario.together or len(names)) * scenario.every_s
            clock.at(self._last_s, partial(self._deploy, name, config))
        self._tick()

    def placements(self) -> dict[str, dict[str, Any]]:
        """Return where each model is, or why it has no place; `unserved`: why the engine would refuse it, "": not."""
        return {name: _described(outcome, self._refusals[name]) for name, outcome in self.outcomes.items()}

    def use(self, span_s: float) -> dict[str, dict[str, Any]]:
        """Return what each device has, and the share of so many seconds in which it computed."""
        busy = dict.fromkeys(self.book.devices, 0.0)
        for fleet in self.fleets.values():
            for (device, _), seconds in fleet.busy_s().items():
                busy[device] += seconds
        free = self.book.free()
        return {
            device.name: {
                "memory_bytes": device.memory_bytes,
                "reserved_bytes": device.memory_bytes - free[device.name],
                "models": list(self.book.models(device.name)),
                "busy": busy[device.name] / span_s if span_s else 0.0,
            }
            for device in self.scenario.devices
        }

    def _tick(self) -> None:
        """Note how busy devices are, as long as a planner will ask."""
        busy = {
            (device, name, rank): seconds
            for name, fleet in self.fleets.items()
            for (device, rank), seconds in fleet.busy_s().items()
        }
        self.book.busy.tell(self._clock.now, busy)
        if self._clock.now < self._last_s:
            self._clock.after(TICK_S, self._tick)

    def _deploy(self, name: str, config: str) -> None:
        scenario = self.scenario
        if config not in self._options:
            space = replace(scenario.space, load=scenario.space.load.shared(scenario.replicas))
            self._options[config] = space.options(scenario.configs[config], scenario.devices)
        options = self._options[config]
        outcome = place(options, self.book.states(), scenario.policy, scenario.theta, scenario.replicas)
        self.outcomes[name] = outcome
        self._refusals[name] = options[0].estimator.layout.refusal
        if isinstance(outcome, Refusal):
            return
        self.book.reserve(name, _bytes_of(outcome))
        option = next(each for each in options if each.configuration == outcome.configuration)
        self.fleets[name] = PlacedFleet(
            self._clock,
            outcome,
            option,
            self._turns,
            scenario.engine,
            noise=scenario.noise,
            stretch_s=scenario.stretch_s,
            seed=self.seed,
            name=f"{name} r",
        )


def _bytes_of(deployment: Deployment) -> dict[str, int]:
    """Return what a deployment has of each device."""
    nbytes: Counter[str] = Counter()
    for stage in deployment.stages:
        for device in stage.devices:
            nbytes[device] += stage.nbytes
    return dict(nbytes)


def _described(outcome: Deployment | Refusal, unserved: str) -> dict[str, Any]:
    if isinstance(outcome, Refusal):
        return {"placed": False, "unserved": unserved, "why_not": str(outcome)}
    stages = [
        {"layers": [stage.layers.start, stage.layers.stop], "devices": list(stage.devices), "bytes": stage.nbytes}
        for stage in outcome.stages
    ]
    configuration = str(outcome.configuration)
    return {
        "placed": True,
        "unserved": unserved,
        "configuration": configuration,
        "stages": stages,
        "bytes": outcome.nbytes,
    }
