"""How many instances of a configuration a deployment has, where that follows its load. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from elastic.errors import ConfigError
from elastic.planning.deployment.placing import Deployment, Refusal
from elastic.planning.estimate.intent import Objective
from elastic.planning.estimate.performance import Load
from elastic.planning.estimate.ranking import Estimate

Choose = Callable[[int, Load], Deployment | Refusal]
"""What is best of so many instances, for the load of all together."""
_HALVINGS, _TRIES = 20, 10
"""A load that is too much is halved so often at the most, and so many shares of it are tried."""


@dataclass(frozen=True)
class ReplicaRange:
    """How many instances there may be. From `least` on, where `most` is more: that which is best for the load."""

    least: int = 1
    most: int = 1

    @classmethod
    def of(cls, replicas: int | str) -> ReplicaRange:
        """Return the range of a number, or of text such as "1-4". Raises `ConfigError` for any other value."""
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", str(replicas), re.ASCII)
        if match is None or isinstance(replicas, bool):
            raise _refused(replicas)
        made = cls(int(match[1]), int(match[2] or match[1]))
        if not 1 <= made.least <= made.most:
            raise _refused(replicas)
        return made

    def within(self, devices: int) -> ReplicaRange:
        """Return what so many devices could have of it; no more than the least where that is more."""
        return ReplicaRange(self.least, max(self.least, min(self.most, devices)))

    def __str__(self) -> str:
        return f"{self.least}-{self.most}" if self.least < self.most else str(self.least)


def total_value(estimate: Estimate, replicas: int, objective: Objective) -> float:
    """Return what an intent wants small, of so many instances together: each adds to all but the latency."""
    return estimate.value(objective) * (1 if objective == "latency" else replicas)


def best_deployment(
    replicas: ReplicaRange,
    load: Load,
    objective: Objective,
    choose: Choose,
    *,
    present: int = 0,
    slack: float = 0.0,
    better: float = 0.15,
) -> Deployment | Refusal:
    """Return the deployment of that number of instances which is best for an objective, or why the most do not serve.

    Numbers are tried from the least on, until one more does not pay: what is wanted small must be smaller by the share
    `better`, or as good on fewer devices. Fewer than are `present` must serve a rate that is larger by the share
    `slack`: what just suffices would soon have to be taken back.
    """
    best: Deployment | Refusal = Refusal(())
    for count in range(replicas.least, replicas.most + 1):
        expected = load if count >= present else replace(load, rate=(1 + slack) * load.rate)
        outcome = choose(count, expected)
        if isinstance(best, Refusal) or (isinstance(outcome, Deployment) and _pays(outcome, best, objective, better)):
            best = outcome
        else:
            break
    return best


def _pays(other: Deployment, best: Deployment, objective: Objective, better: float) -> bool:
    mine = total_value(best.estimate, len(best.instances), objective)
    value = total_value(other.estimate, len(other.instances), objective)
    fewer = len(other.devices) < len(best.devices)
    return value < (1 - better) * mine or (fewer and value < mine / (1 - better))


def most_served(replicas: ReplicaRange, load: Load, choose: Choose, present: int) -> Deployment | None:
    """Return a deployment of more instances than are present that serves as much as can be of a load that none serves.

    None: devices have no room for more.
    """
    for count in range(replicas.most, max(present, replicas.least - 1), -1):
        idle = choose(count, replace(load, rate=0.0))
        if isinstance(idle, Deployment):
            return _with_most(load, partial(choose, count), idle)
    return None


def _with_most(load: Load, choose: Callable[[Load], Deployment | Refusal], idle: Deployment) -> Deployment:
    """Return what is chosen for the largest share of a load that is served, within 2 %."""
    most, low, high = idle, float(_HALVINGS), 0.0  # halvings: with `low` of them it is served
    for _ in range(_TRIES):
        middle = (low + high) / 2
        outcome = choose(replace(load, rate=load.rate * 2**-middle))
        if isinstance(outcome, Deployment):
            most, low = outcome, middle
        else:
            high = middle
    return most


def _refused(replicas: object) -> ConfigError:
    return ConfigError(
        f"replicas={replicas!r} cannot be; give a whole number, at least 1, or a range such as '1-4', in which "
        "the number follows the load"
    )
