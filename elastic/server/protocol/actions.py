"""The bodies of requests to `/elastic/actions`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Layers = Annotated[list[int], Field(min_length=1, max_length=10_000, fail_fast=True)]
Names = Annotated[list[str], Field(max_length=100, fail_fast=True)]


class ActionBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class SwapBody(ActionBody):
    """Decoder layers, or parts of them, in another variant."""

    kind: Literal["swap"]
    layers: Layers
    variant: str
    parts: Names = []


class RestoreBody(ActionBody):
    """The full weights; without `layers`, of all that were at their place when the model was wrapped."""

    kind: Literal["restore"]
    layers: Layers | None = None
    parts: Names = []


class ReleaseBody(ActionBody):
    """The weights of layers leave for host memory."""

    kind: Literal["release"]
    layers: Layers


class MigrateBody(ActionBody):
    """Layers, or parts of them, at another place from then on, in the variant that they are in."""

    kind: Literal["migrate"]
    layers: Layers
    place: str
    parts: Names = []


class PlaceBody(ActionBody):
    """Layers, and the place where the action has them."""

    layers: Layers
    place: str


class MigrateKVBody(PlaceBody):
    """The KV cache of layers at another place from then on."""

    kind: Literal["migrate_kv"]


class ReplicateBody(PlaceBody):
    """Layers at one more place, which computes a part of each batch."""

    kind: Literal["replicate"]


class EvictBody(PlaceBody):
    """The replicas of layers leave a place."""

    kind: Literal["evict"]


class ResizeKVBody(ActionBody):
    """The most bytes that new KV caches may hold: `limit` is bytes, text such as "4GiB", or "max"."""

    kind: Literal["resize_kv"]
    limit: Annotated[int, Field(ge=0, le=2**62)] | str
    place: str | None = None
    """None: the only place there is."""


AnyActionBody = Annotated[
    SwapBody | RestoreBody | ReleaseBody | ResizeKVBody | MigrateBody | MigrateKVBody | ReplicateBody | EvictBody,
    Field(discriminator="kind"),
]


class ActionsBody(ActionBody):
    """`POST /elastic/actions`."""

    actions: Annotated[list[AnyActionBody], Field(min_length=1, max_length=100, fail_fast=True)]
    dry_run: bool = False
    rank: str | None = None
    """Of a fleet: the rank that is meant; None: all of them, all or none."""


class PrepareBody(ActionBody):
    """`POST /elastic/actions/prepare`."""

    actions: Annotated[list[AnyActionBody], Field(min_length=1, max_length=100, fail_fast=True)]
    id: Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9._:-]+$")] | None = None
    """Of the transaction, chosen by the client; None: a new one."""
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    rank: str | None = None
    """As for `ActionsBody`."""
