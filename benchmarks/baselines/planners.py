"""Planners of placements behind one protocol: the intent's, and what iServe is compared with. (iServe, section 8)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from elastic.planning.deployment.devices import DeviceState
from elastic.planning.deployment.placing import Deployment, Option, Refusal, place
from elastic.planning.deployment.policies import THETA, PolicyName


class Planner(Protocol):
    """Says where a model goes."""

    def place(
        self, model: str, options: Sequence[Option], states: Sequence[DeviceState]
    ) -> tuple[Deployment, ...] | Refusal:
        """Return the instances of a model, each with a place of its own, or why there is none.

        `options`: the model's configurations, the best for the intent first; `states`: the devices as they are now.
        """


@dataclass(frozen=True)
class ByIntent:
    """The best configuration for the intent that fits, on devices chosen by a policy."""

    policy: PolicyName = "hybrid"
    theta: float = THETA

    def place(
        self, model: str, options: Sequence[Option], states: Sequence[DeviceState]
    ) -> tuple[Deployment, ...] | Refusal:
        """Return one instance."""
        return _one(options, states, self.policy, self.theta)


@dataclass(frozen=True)
class Static:
    """One configuration of full weights for every model, whatever is free: what users do who do not search.

    "tp" and "pp": as much tensor or pipeline parallelism as there are devices, or as the model allows. "as loaded": the
    fewest devices that hold the model, as a library would load it.
    """

    parallel: Literal["tp", "pp", "as loaded"]

    def place(
        self, model: str, options: Sequence[Option], states: Sequence[DeviceState]
    ) -> tuple[Deployment, ...] | Refusal:
        """Return one instance on the devices with the most free memory; nothing else is tried where that is full."""
        full = [each for each in options if not each.configuration.compressed]
        possible = [each for each in full if not each.estimate.why_not]
        if not possible:
            return Refusal(tuple((each.configuration, each.estimate.why_not) for each in full))
        chosen = min(possible, key=self._order)
        by_memory = [DeviceState(state.name, state.free_bytes, 0.0, state.models) for state in states]
        return _one([chosen], by_memory, "least-loaded", 0.0)

    def _order(self, option: Option) -> tuple[int, ...]:
        """Return what is least for the option to take."""
        tp, pp = option.configuration.tp, option.configuration.pp
        return {"tp": (-tp, -pp), "pp": (-pp, -tp), "as loaded": (tp * pp, tp)}[self.parallel]


@dataclass(frozen=True)
class Planned:
    """What was planned of all models together, such as by AlpaServe with the requests known beforehand."""

    deployments: Mapping[str, tuple[Deployment, ...]]

    def place(
        self, model: str, options: Sequence[Option], states: Sequence[DeviceState]
    ) -> tuple[Deployment, ...] | Refusal:
        """Return the instances that were planned, of which there may be several."""
        return self.deployments.get(model) or Refusal(())


def _one(
    options: Sequence[Option], states: Sequence[DeviceState], policy: PolicyName, theta: float
) -> tuple[Deployment, ...] | Refusal:
    placed = place(options, states, policy, theta)
    return (placed,) if isinstance(placed, Deployment) else placed
