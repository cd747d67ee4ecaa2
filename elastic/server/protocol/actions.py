"""The bodies of requests to `/elastic/actions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from elastic.config import parse_limit
from elastic.errors import ConfigError
from elastic.server.protocol.fields import StrictBody, Text
from elastic.types import Action, Evict, Migrate, MigrateKV, Release, Replicate, ResizeKV, Restore, Swap

Layers = Annotated[list[int], Field(min_length=1, max_length=10_000, fail_fast=True)]
Names = Annotated[list[Text], Field(max_length=100, fail_fast=True)]


class SwapBody(StrictBody):
    """Decoder layers, or parts of them, in another variant."""

    kind: Literal["swap"]
    layers: Layers
    variant: Text
    parts: Names = []


class RestoreBody(StrictBody):
    """The full weights; without `layers`, of all that were at their place when the model was wrapped."""

    kind: Literal["restore"]
    layers: Layers | None = None
    parts: Names = []


class ReleaseBody(StrictBody):
    """The weights of layers leave for host memory."""

    kind: Literal["release"]
    layers: Layers


class PlaceBody(StrictBody):
    """Layers, and the place where the action has them."""

    layers: Layers
    place: Text


class MigrateBody(PlaceBody):
    """Layers, or parts of them, at another place from then on, in the variant that they are in."""

    kind: Literal["migrate"]
    parts: Names = []


class MigrateKVBody(PlaceBody):
    """The KV cache of layers at another place from then on."""

    kind: Literal["migrate_kv"]


class ReplicateBody(PlaceBody):
    """Layers at one more place, which computes a part of each batch."""

    kind: Literal["replicate"]


class EvictBody(PlaceBody):
    """The replicas of layers leave a place."""

    kind: Literal["evict"]


class ResizeKVBody(StrictBody):
    """The most bytes that new KV caches may hold: `limit` is bytes, text such as "4GiB", or "max"."""

    kind: Literal["resize_kv"]
    limit: Annotated[int, Field(ge=0, le=2**62)] | Text
    place: Text | None = None
    """None: the only place there is."""


LayersBody = SwapBody | RestoreBody | ReleaseBody | MigrateBody | MigrateKVBody | ReplicateBody | EvictBody
AnyActionBody = Annotated[LayersBody | ResizeKVBody, Field(discriminator="kind")]


def action_of(body: AnyActionBody, places: Sequence[str], count: int, home: Sequence[int] | None = None) -> Action:
    """Return the action on a model of so many layers, with caches at these places.

    Without layers it is on those of `home`; None: all. Raises `ConfigError` for layers and places that there are not.
    """
    if isinstance(body, ResizeKVBody):
        place = places[0] if body.place is None and len(places) == 1 else body.place
        if place not in places:
            raise ConfigError(f"place={place!r}: choose one of {list(places)}")
        return ResizeKV(str(place), parse_limit(body.limit, option="limit"))
    return _layers_action(body, range(count) if home is None else home, count)


def _layers_action(body: LayersBody, home: Sequence[int], count: int) -> Action:
    layers = tuple(home if body.layers is None else body.layers)
    wrong = [layer for layer in layers if not 0 <= layer < count]
    if wrong:
        raise ConfigError(f"layers={wrong[:10]}: the model has layers 0 to {count - 1}")
    match body:
        case SwapBody():
            return Swap(layers, body.variant, tuple(body.parts))
        case RestoreBody():
            return Restore(layers, tuple(body.parts))
        case ReleaseBody():
            return Release(layers)
        case MigrateBody():
            return Migrate(layers, body.place, tuple(body.parts))
        case MigrateKVBody():
            return MigrateKV(layers, body.place)
        case ReplicateBody():
            return Replicate(layers, body.place)
        case EvictBody():
            return Evict(layers, body.place)


class RankActions(StrictBody):
    """Actions, and whose they are."""

    actions: Annotated[list[AnyActionBody], Field(min_length=1, max_length=100, fail_fast=True)]
    rank: Text | None = None
    """Of a fleet: the rank that is meant; None: all of them, all or none."""


class ActionsBody(RankActions):
    """`POST /elastic/actions`."""

    dry_run: bool = False


class PrepareBody(RankActions):
    """`POST /elastic/actions/prepare`."""

    id: Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9._:-]+$")] | None = None
    """Of the transaction, chosen by the client; None: a new one."""
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
