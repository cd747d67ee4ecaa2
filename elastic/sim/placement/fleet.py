"""A fleet whose instances are where a planner has placed them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from elastic.estimation.options import ModelOption
from elastic.planning.deployment.devices import Stage
from elastic.planning.deployment.placing import Deployment
from elastic.planning.estimate.devices import Device
from elastic.sim.core.clock import VirtualClock
from elastic.sim.core.executor import LocalExecutor
from elastic.sim.core.fleet import RankModel, SimulatedFleet
from elastic.sim.core.host import ComputeTurn, SharedDevices
from elastic.sim.core.instance import EngineOptions, PlacePages, SimulatedInstance
from elastic.sim.core.step_seconds import StepNoise
from elastic.sim.placement.executor import StagedExecutor, StagedSeconds
from elastic.sim.placement.rank_pages import rank_pages


@dataclass(frozen=True)
class PlacedInstance:
    """One instance of a deployment."""

    stages: tuple[Stage, ...]
    cost: StagedSeconds
    pages: PlacePages
    """Of the stage with the least room: it bounds what all stages can hold of a request."""

    @classmethod
    def of(cls, option: ModelOption, stages: tuple[Stage, ...], requests: int) -> PlacedInstance:
        """Return what an instance in such stages costs, and the memory that it was given for so many requests.

        Raises `ConfigError` as `rank_pages`.
        """
        estimator, kind = option.estimator, option.estimator.devices[0].kind
        pages = [
            rank_pages(estimator, option.configuration, stage.layers, Device("", kind, stage.nbytes), requests)
            for stage in stages
        ]
        return cls(stages, StagedSeconds(option.cost(stages)), min(pages, key=_blocks))


class PlacedFleet(SimulatedFleet):
    """The instances of a model, which compute on devices that other models may compute on, too."""

    def __init__(
        self,
        clock: VirtualClock,
        deployment: Deployment,
        option: ModelOption,
        turns: Mapping[str, ComputeTurn],
        engine: EngineOptions,
        *,
        noise: float = 0.0,
        stretch_s: float = 0.0,
        seed: int = 0,
        name: str = "r",
    ) -> None:
        """`turns`: of each device, by name."""
        self.deployment, self._turns = deployment, turns
        self.placed = [PlacedInstance.of(option, stages, deployment.requests) for stages in deployment.instances]
        first = self.placed[0]
        model = RankModel(engine, first.pages, first.cost, noise, stretch_s=stretch_s)
        super().__init__(clock, model, len(self.placed), seed=seed, name=name)

    def busy_s(self) -> dict[tuple[str, str], float]:
        """Return for how long each rank has computed, by its device and name."""
        told: dict[tuple[str, str], float] = {}
        for placed, (name, instance) in zip(self.placed, self.instances.items(), strict=True):
            assert isinstance(instance.local, StagedExecutor)
            for number, (stage, seconds) in enumerate(zip(placed.stages, instance.local.stage_busy_s, strict=True)):
                told.update({(device, f"{name}.{number}"): seconds for device in stage.devices})
        return told

    def _executor(self, number: int, noise: StepNoise) -> LocalExecutor:
        placed = self.placed[number]
        stages = [SharedDevices(self.clock, [self._turns[name] for name in stage.devices]) for stage in placed.stages]
        return StagedExecutor(self.clock, placed.cost, noise, self.answers, stages)

    def _make(self, name: str, executor: LocalExecutor) -> SimulatedInstance:
        """Return an instance that has as many steps in flight as stages, each of other requests."""
        placed = self.placed[len(self.instances)]
        made = SimulatedInstance(self.clock, name, self.model.engine, placed.pages, executor, self.model.stretch_s)
        assert isinstance(executor, StagedExecutor)
        executor.on_wanted = made.wake
        made.batches = partial(len, placed.stages)
        return made


def _blocks(pages: PlacePages) -> int:
    return (pages.budget - pages.weights) // pages.sector * pages.blocks_per_sector
