"""What came of a drop, a restore or a migration between ranks: frozen records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from elastic.controller.policies.group_costs import GroupPrice
from elastic.engines.pipeline.path import LayerPath
from elastic.planning.arrangement.drop import GroupPlan
from elastic.planning.sharding.numbers import by_layer

Status = Literal["applied", "partial", "deferred", "planned"]
"""`applied`: as was asked. `partial`: it was stopped on the way; all serve on with the layers where they are now.
`deferred`: no layer changed its rank; live requests need too much of the memory, or a rank cannot drop its weights.
`planned`: a dry run; `deferred` there is what would come of it."""


@dataclass(frozen=True)
class Exchanged:
    """Layers that changed their rank under running requests."""

    status: Status
    flips: int = 0
    """Layers of instances, or parts of layers, that another rank computes now."""
    moved_bytes: int = 0
    """Keys and values that were copied. Planned: all that live requests have, and are promised, in what moves."""
    fetched_bytes: int = 0
    """Weights that came back, from other ranks or the checkpoint. Planned: that would come, in whole pages."""
    stalled_ms: float = 0.0
    """The longest that an instance stood still for one flip."""
    seconds: float = 0.0
    """What it took. Planned: copies, pauses, and the steps for whose end it waits; live requests fit at once."""
    why: str = ""
    """What stopped it."""
    timeline: tuple[tuple[str, float], ...] = ()
    """What of it was done when: in seconds from its beginning."""
    restored: Mapping[str, tuple[int, ...]] = field(default_factory=dict, hash=False)
    """Rank -> layers that were in a variant, and were restored first: only full weights leave, or are shared."""
    price: GroupPrice | None = None
    """Planned: what it would cost, in the arbiter's seconds of serving; with longer steps, where ranks know them."""


@dataclass(frozen=True)
class Dropped(Exchanged):
    """What `Fleet.drop` came to."""

    groups: tuple[GroupPlan, ...] = ()
    """As they were planned."""
    freed_bytes: int = 0
    """Weights that have left: they are room for keys and values. Planned: that would leave."""


@dataclass(frozen=True)
class Restored(Exchanged):
    """What `Fleet.restore` and `Fleet.split` came to."""

    members: tuple[str, ...] = ()
    """Ranks of the groups that it was about."""


@dataclass(frozen=True)
class Migrated(Exchanged):
    """What `Fleet.migrate` came to."""

    home: str = ""
    rank: str = ""
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Replicated(Exchanged):
    """What `Fleet.replicate` and `Fleet.evict` came to."""

    home: str = ""
    rank: str = ""
    """Where the replicas are; evicted: none."""
    layers: tuple[int, ...] = ()
    """That have a replica now, of those that were asked for; evicted: that have none any more."""


@dataclass(frozen=True)
class Resharded(Exchanged):
    """What `Fleet.reshard` came to."""

    members: tuple[str, ...] = ()
    """Ranks that it was about."""
    tp: int = 1
    """How many of them share every layer."""
    freed_bytes: int = 0
    """Weights that have left: they are room for keys and values. Planned: that would leave."""


@dataclass(frozen=True)
class GroupStatus:
    """Instances that compute layers of each other, or could."""

    members: tuple[str, ...]
    """Ranks, each the home of an instance."""
    paths: Mapping[str, LayerPath] = field(hash=False)
    """Of each home."""
    keeps: Mapping[str, tuple[int, ...]] = field(hash=False)
    """Rank -> the layers all of whose weights it has."""
    caps: Mapping[str, int | None] = field(hash=False)
    """Home -> the most sectors of KV cache that its requests may have now; None: it has its rank's for itself."""
    alone: Mapping[str, int] = field(hash=False)
    """Home -> the sectors that it has by itself, with all weights there."""

    tp: int = 1
    """How many ranks share a layer, at the most."""
    shards: Mapping[str, tuple[int, ...]] = field(default_factory=dict, hash=False)
    """Rank -> the shards whose weights it has, by their numbers in the paths."""

    @property
    def dropped(self) -> dict[str, tuple[int, ...]]:
        """Rank -> the layers of whose weights it has none."""
        return {rank: about["dropped"] for rank, about in self.held().items()}

    def held(self) -> dict[str, dict[str, Any]]:
        """Return what `RankStatus` says of each rank's weights."""
        path = next(iter(self.paths.values()))
        told: dict[str, dict[str, Any]] = {}
        for rank, shards in self.shards.items():
            have = by_layer(shards, path.shards)
            told[rank] = {"dropped": tuple(i for i in range(path.layers) if i not in have)}
            if self.tp > 1:
                told[rank]["shards"] = tuple(len(have.get(i, ())) for i in range(path.layers))
        return told


def added_up(done: Sequence[Exchanged]) -> dict[str, Any]:
    """Add up what came of several groups; the status is that of the first that was not applied."""
    stopped = next((each for each in done if each.status != "applied"), None)
    partly = stopped is not None and stopped.status == "deferred" and any(each.flips for each in done)
    return {
        "status": "partial" if partly else stopped.status if stopped is not None else "applied",
        "flips": sum(each.flips for each in done),
        "moved_bytes": sum(each.moved_bytes for each in done),
        "fetched_bytes": sum(each.fetched_bytes for each in done),
        "stalled_ms": max((each.stalled_ms for each in done), default=0.0),
        "seconds": sum(each.seconds for each in done),
        "why": stopped.why if stopped is not None else "",
        "restored": {rank: layers for each in done for rank, layers in each.restored.items()},
    }
