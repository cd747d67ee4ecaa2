"""What deployments say of themselves: frozen records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from elastic.estimation.costs import Costs
from elastic.planning.deployment.placing import Deployment
from elastic.planning.estimate.intent import Intent
from elastic.planning.estimate.performance import Load
from elastic.planning.estimate.ranking import Estimate

StepKind = Literal["add", "part", "restore", "swap", "remove", "share", "drop", "limit"]
"""`add`, `remove`: a rank. `part`: ranks compute whole models again. `restore`, `swap`: the form of layers.
`share`: ranks share every layer. `drop`: each keeps the layers of a stage. `limit`: what the KV cache may have."""


@dataclass(frozen=True)
class TransitionStep:
    """One thing to do on the way to another configuration."""

    kind: StepKind
    devices: tuple[str, ...]
    """Whose ranks it is about."""
    layers: tuple[range, ...] = ()
    """`drop`: those that each rank keeps. `restore`, `swap`: those of each rank."""
    weights: str = ""
    """`swap`: the variant."""
    moved_bytes: int = 0
    """Bytes of weights that are read or copied, about."""
    seconds: float = 0.0
    """About how long it takes; requests are served meanwhile."""


@dataclass(frozen=True)
class Replanned:
    """What a change of a deployment came to, or would come to."""

    status: Literal["applied", "planned", "unchanged", "partial"]
    """`planned`: a dry run. `partial`: it was stopped on the way, and serves on as it is."""
    before: str
    """The configuration."""
    after: str
    steps: tuple[TransitionStep, ...] = ()
    why: str = ""
    seconds: float = 0.0
    """Planned: about; applied: that it took."""
    moved_bytes: int = 0


@dataclass(frozen=True)
class StageStatus:
    """Adjacent layers, and what their ranks take."""

    layers: tuple[int, int]
    """The first and the last one."""
    devices: tuple[str, ...]
    nbytes: int
    """Of each device, with the KV cache."""


@dataclass(frozen=True)
class LinkStatus:
    """Two devices whose ranks exchange what they compute, and what estimates take that to cost."""

    devices: tuple[str, str]
    basis: str
    """`measured`: between two ranks of this host. `assumed`: the rate is that of the data sheet, if there is one."""
    fixed_s: float
    byte_s: float


def links_of(plan: Deployment, costs: Costs) -> tuple[LinkStatus, ...]:
    """Return the links of all instances; what was measured of two ranks stands for all of a kind of devices."""
    link = costs.link
    return tuple(LinkStatus(pair, costs.link_basis, link.fixed_s, link.each_s) for pair in plan.links)


@dataclass(frozen=True)
class DeploymentStatus:
    """A model that is deployed."""

    name: str
    path: str
    configuration: str
    stages: tuple[StageStatus, ...]
    intent: Intent
    load: Load
    """The requests that it was planned for last."""
    estimate: Estimate = field(repr=False)
    """Of the configuration, with these requests."""
    reason: str
    """What re-planning said last."""
    changes: int
    """How many times its configuration has changed."""
    replicas: int = 1
    """Instances that have the configuration."""
    replica_range: str = "1"
    """How many there may be: a number, or such as "1-4", in which it follows the load."""
    links: tuple[LinkStatus, ...] = ()


@dataclass(frozen=True)
class DeviceStatus:
    """A device that deployments share."""

    name: str
    memory_bytes: int
    free_bytes: int
    """That no deployment has reserved."""
    load: float
    """The share of the last two minutes in which ranks computed there, or anybody where that is known and more."""
    models: tuple[str, ...]
    guest: str = ""
    """Of which model fingerprints are measured there now."""
