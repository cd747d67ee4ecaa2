"""Configurations of a model as options for a planner of placements, with the bytes of any stage as estimates count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from elastic.errors import ConfigError
from elastic.estimation.estimate import WEIGHTS, Estimator
from elastic.planning.deployment.devices import Stage
from elastic.planning.estimate.configuration import FULL, Configuration
from elastic.planning.estimate.devices import Device
from elastic.planning.estimate.intent import Intent, Objective
from elastic.planning.estimate.performance import InstanceCost
from elastic.planning.estimate.ranking import Estimate, judge, rank


@dataclass(frozen=True)
class ModelOption:
    """One configuration of one model."""

    estimator: Estimator = field(repr=False)
    intent: Intent
    estimate: Estimate
    """With even stages on devices that have nothing else."""
    _needs: dict[tuple[range, int], int] = field(default_factory=dict, repr=False, compare=False)
    _judged: dict[tuple[tuple[Stage, ...], int], Estimate] = field(default_factory=dict, repr=False, compare=False)
    _costs: dict[tuple[range, ...], InstanceCost] = field(default_factory=dict, repr=False, compare=False)

    @property
    def configuration(self) -> Configuration:
        """The degrees of parallelism, and the forms of weights, keys and values."""
        return self.estimate.configuration

    @property
    def layers(self) -> int:
        """Decoder layers of the model."""
        return len(self.estimator.layout.decoder.layers)

    def need(self, layers: range, requests: int) -> int:
        """Return the bytes of each rank of a stage with these layers, and room for so many requests."""
        key = layers, requests
        if key not in self._needs:
            self._needs[key] = self.estimator.need(self.configuration, layers, requests)
        return self._needs[key]

    def judge(self, stages: Sequence[Stage], requests: int) -> Estimate:
        """Return what is expected of stages with room for so many requests."""
        key = tuple(stages), requests
        if key not in self._judged:
            kind = self.estimator.devices[0].kind
            devices = [Device(name, kind, stage.nbytes) for stage in stages for name in stage.devices]
            cut = [stage.layers for stage in stages]
            candidate = self.estimator.candidate_on(self.configuration, cut, devices, requests)
            self._judged[key] = judge(candidate, self.estimator.load, self.intent)
        return self._judged[key]

    def busy(self, stages: Sequence[Stage], requests: int) -> tuple[float, ...]:
        """Return for each stage the share of time that it would compute."""
        return self.cost(stages).busy(self.estimator.load, requests)

    def cost(self, stages: Sequence[Stage]) -> InstanceCost:
        """Return the seconds of batches in such stages. Raises `ConfigError` where they are not known."""
        cut = tuple(stage.layers for stage in stages)
        if cut not in self._costs:
            cost = self.estimator.instance_cost(self.configuration, cut)
            if cost is None:
                raise ConfigError(f"the seconds of {self.configuration} are not known; measure them")
            self._costs[cut] = cost
        return self._costs[cut]


def options(
    estimator: Estimator,
    intent: Intent | Objective = "cost",
    weights: Sequence[str] = WEIGHTS,
    kv: Sequence[str] = (FULL,),
) -> tuple[ModelOption, ...]:
    """Return the configurations of a model on some devices, the best for the intent first, then those that cannot be.

    They are ranked as if all devices were as large as the largest, and free: whether they are, planners ask.
    Raises `ConfigError` for an unknown variant, form or objective.
    """
    largest = estimator.devices[0]
    alike = replace(estimator, devices=[replace(each, memory_bytes=largest.memory_bytes) for each in estimator.devices])
    wanted = Intent.of(intent)
    estimates = rank(alike.candidates(alike.space(weights, kv)), alike.load, wanted)
    return tuple(ModelOption(estimator, wanted, each) for each in estimates)
