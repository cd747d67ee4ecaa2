"""The bodies of requests to `/elastic/fleet`: of a fleet's verbs, and of those of deployments."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from elastic.planning.estimate.intent import Objective
from elastic.planning.estimate.performance import Load
from elastic.server.protocol.fields import StrictBody

Name = Annotated[str, Field(min_length=1, max_length=200)]
Layers = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=10_000, fail_fast=True)]
SomeLayers = Annotated[Layers, Field(min_length=1)]
Most = Annotated[int, Field(ge=1, lt=2**31)]
Degree = Annotated[int, Field(ge=1, le=1024)]
Size = Annotated[int, Field(ge=1, lt=2**63)] | Name
"""Bytes, or text such as 24MiB."""
Replicas = Annotated[int, Field(ge=1, lt=2**16)] | Annotated[str, Field(pattern=r"^\d{1,5}(-\d{1,5})?$")]
MOST_S = 600.0
"""How long live requests may take, at the most, to fit in what is left while layers change their rank."""


class MoveBody(StrictBody):
    """A request that is to go on at another instance."""

    request: Name
    instance: Name


class AddBody(StrictBody):
    """One more rank; without `places`, as the fleet chooses."""

    places: Annotated[list[Name], Field(max_length=100, fail_fast=True)] = []


class RemoveBody(StrictBody):
    """A rank that is to end. Its requests go on elsewhere; with `drain`, it ends when they have."""

    rank: Name
    drain: bool = True


class PlanBody(StrictBody):
    """So many bytes of KV that requests lack."""

    need: Size


class CapacityBody(StrictBody):
    """Numbers of ranks that could share layers."""

    degrees: Annotated[list[Degree], Field(min_length=1, max_length=100, fail_fast=True)] = [1, 2, 4]


class ExchangeBody(StrictBody):
    """How layers change their rank."""

    exchange: Literal["live", "stall"] = "live"
    coordinated: bool = True
    layers_per_step: Most | None = None
    timeout_s: Annotated[float, Field(gt=0, le=MOST_S)] | None = None
    dry_run: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of the fleet's verb, but those that are left to it."""
        left = {name for name in ("timeout_s", "whole", "most", "sharing") if not getattr(self, name, None)}
        return self.model_dump(exclude=left)


class DropBody(ExchangeBody):
    """Layers that are to leave: so many bytes of them, or those of each rank."""

    need: Size | None = None
    layers: Annotated[dict[Name, Layers], Field(max_length=1000)] | None = None
    whole: bool = False
    most: Annotated[int, Field(ge=2, lt=2**31)] | None = None


class RestoreGroupBody(ExchangeBody):
    """A rank of the group whose layers are to return; without it, all groups."""

    rank: Name | None = None
    sharing: bool = False


class ReshardBody(ExchangeBody):
    """Instances whose ranks are to share every layer, `tp` of them each."""

    instances: Annotated[list[Name], Field(min_length=1, max_length=1000, fail_fast=True)]
    tp: Degree


class MigrateGroupBody(ExchangeBody):
    """Layers of an instance that another rank is to compute."""

    home: Name
    layers: SomeLayers
    rank: Name


class ReplicateGroupBody(StrictBody):
    """Layers of an instance that another rank is to compute too, for half of its requests."""

    home: Name
    layers: SomeLayers
    rank: Name
    dry_run: bool = False


class EvictGroupBody(StrictBody):
    """Layers of an instance that are to have no replica; without `layers`, all."""

    home: Name
    layers: SomeLayers | None = None


class MergeBody(StrictBody):
    """Ranks that are to be able to compute each other's layers."""

    ranks: Annotated[list[Name], Field(min_length=2, max_length=1000, fail_fast=True)]


class SplitBody(StrictBody):
    """A rank of the group that is to part."""

    rank: Name


class IntentBody(StrictBody):
    """What is to be small, and what may not be exceeded: the fields of `Intent`."""

    minimize: Objective | None = None
    latency_s: float | None = None
    cost: float | None = None
    quality_loss: float | None = None
    tolerance: float = 0.0


class LoadBody(StrictBody):
    """The requests to be ready for."""

    prompt: Most | None = None
    new: Most | None = None
    rate: Annotated[float, Field(ge=0, lt=1e9)] | None = None

    def over(self, usual: Load) -> Load:
        """Return the load, which is as usual in what it leaves out."""
        return replace(usual, **self.model_dump(exclude_none=True))


class DeployBody(StrictBody):
    """A model's directory on the server."""

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    name: Name | None = None
    intent: IntentBody = IntentBody()
    load: LoadBody | None = None
    weights: Annotated[list[Name], Field(min_length=1, max_length=100, fail_fast=True)] | None = None
    replicas: Replicas = 1


class IntendBody(StrictBody):
    """What is wanted of a deployment now."""

    name: Name
    intent: IntentBody | None = None
    load: LoadBody | None = None
    replicas: Replicas | None = None
    dry_run: bool = False


class ResizeBody(StrictBody):
    """What all deployments together may have of a device from now on: bytes, or such as "40GiB"."""

    device: Name
    memory: Annotated[int, Field(ge=0, lt=2**63)] | Annotated[str, Field(min_length=1, max_length=40)]


class UndeployBody(StrictBody):
    """A deployment that is to end; with `drain`, when its requests have ended."""

    name: Name
    drain: bool = True
