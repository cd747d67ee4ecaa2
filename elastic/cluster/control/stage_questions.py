"""Questions about layers that one rank computes for another: what a fleet asks so that instances form a pipeline.

A *home* is a rank whose engine plans steps, a *stage* of it another rank that computes some of its layers. The fleet
has layers change their rank one after another; who copies what, and when the path of the steps changes, the two ranks
settle between themselves, by the log of the home (`engines.pipeline.items`).

What changes its rank is a shard of a layer, by its number in the `LayerPath`; where layers are not cut, it is a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from elastic.engines.core.kv_state import KVSource, LayersKV
from elastic.engines.pipeline.path import LayerPath, Way
from elastic.planning.arrangement.step_pages import StepPages
from elastic.planning.sharding.heads import kv_parts
from elastic.planning.sharding.numbers import by_layer
from elastic.planning.sharding.shard_pages import ShardPages
from elastic.types import WeightsSource

Bulk = Literal["sockets", "nixl"]

# -- connections


@dataclass(frozen=True)
class OpenPeers:
    """Listen for other ranks, from the first time on; answers with the address, (host, port)."""

    rank: str
    key: bytes = field(repr=False)
    """Who connects has to prove it."""
    bulk: Bulk = "sockets"
    """How it reads the memory of other ranks."""


@dataclass(frozen=True)
class MeetPeers:
    """Know where other ranks listen: addresses by rank."""

    addresses: Mapping[str, tuple[str, int]] = field(hash=False)


@dataclass(frozen=True)
class LosePeer:
    """Another rank has gone: whatever waits for it fails now."""

    rank: str


@dataclass(frozen=True)
class OpenStage:
    """Be a stage of a home, which attaches it at the same time; `sectors` is the most that the home will map."""

    home: str
    path: LayerPath
    sectors: int
    addresses: int
    """The home's `Room.most_sectors`."""


@dataclass(frozen=True)
class AttachStage:
    """Have another rank be a stage of the engine here, which opens at the same time."""

    rank: str


@dataclass(frozen=True)
class DetachStage:
    """Let go of a stage that computes no layer."""

    rank: str


@dataclass(frozen=True)
class CloseStage:
    """Be no stage of a home any more, also when it has gone; unknown: nothing happens."""

    home: str
    keep: bool = False
    """Keep its keys and values until this is asked again without, but where a `Recover` needs the room before
    `KeptLayers`."""


# -- memory


@dataclass(frozen=True)
class Room:
    """What a rank's memory could hold, in pages and sectors."""

    path: LayerPath
    """Of its own engine."""
    pages: int
    """For keys and values, of its engine and of those that it is a stage of."""
    page_bytes: int
    sector_pages: tuple[int, ...]
    """Of each part of the KV cache, the pages that a sector of its group has in it."""
    most_sectors: int
    """That its engine has addresses for."""
    committed_sectors: int
    """That live requests of its engine have, and are promised."""
    held_bytes: tuple[int, ...]
    """Of each part of the KV cache, the bytes of the engine's blocks that hold something, or are kept for reuse."""
    weight_pages: tuple[ShardPages, ...]
    """Of each decoder layer, the pages that its weights have when some of its shards are there."""
    resident: frozenset[int]
    """Shards whose weights are there."""
    in_variant: Mapping[int, int] = field(default_factory=dict, hash=False)
    """Layers that are not in their full weights -> the pages that they have; of these `pages` knows nothing."""
    step_s: float = 0.0
    """Seconds of a step of its engine while it computes all layers, in the mean of the last; 0.0: there was none."""
    hop_s: float = 0.0
    """Seconds that a step of its engine waits for another rank at a time, beyond what that computes; 0.0: none has."""
    steps: StepPages = field(default_factory=StepPages)
    """That it keeps free for what steps take; of these `pages` knows nothing."""
    _counted: dict[frozenset[int], int] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Pages of weights by shards, as far as they were counted."""

    @property
    def usable_pages(self) -> int:
        """For keys and values, and what steps take that have them."""
        return self.pages + self.steps.kept(self.pages // sum(self.sector_pages))

    @property
    def growth_pages(self) -> int:
        """By which weights grow when all layers are in their full ones again."""
        every = range(self.path.shards)
        return sum(self.weight_pages[layer].pages(every) - pages for layer, pages in self.in_variant.items())

    def step_pages(self, parts: int, *, beside: int = 0) -> int:
        """Count the pages for steps that come with so many parts of each sector of an instance, `beside` others."""
        every = len(self.sector_pages)
        return self.steps.of((parts + beside) / every) - self.steps.of(beside / every)

    def weights_of(self, shards: Iterable[int]) -> int:
        """Count the pages of weights when these shards are there, and no others. Plans ask again and again."""
        key = frozenset(shards)
        pages = self._counted.get(key)
        if pages is None:
            layers = by_layer(key, self.path.shards)
            pages = self._counted[key] = sum(self.weight_pages[layer].pages(parts) for layer, parts in layers.items())
        return pages

    def parts_of(self, shards: Iterable[int]) -> tuple[int, ...]:
        """Return the parts of the KV cache that shards need."""
        each, numbers = len(self.sector_pages) // self.path.layers, self.path.numbers
        return kv_parts({shard % numbers for shard in shards}, self.path.shards, each)


@dataclass(frozen=True)
class MeasureRoom:
    """`Room`."""

    rank: str
    """The name by which the fleet knows the rank: its engine has it from now on."""


@dataclass(frozen=True)
class SetCap:
    """Have the engine map no more sectors than that for new requests; None: all there is room for.

    The answer is its `EngineLoad` then.
    """

    sectors: int | None


@dataclass(frozen=True)
class CapReached:
    """Whether what live requests have, and are promised, is within the cap."""


@dataclass(frozen=True)
class Allot:
    """As a stage: keep room for so many sectors of a home. Raises `CapacityError`, and nothing has changed."""

    home: str
    sectors: int


# -- keys and values that change their rank


@dataclass(frozen=True)
class LayersMemory:
    """Where the keys and values of a home's shards lie at this rank: `LayersKV`."""

    home: str
    shards: tuple[int, ...]


@dataclass(frozen=True)
class KeptLayers:
    """Where this rank has what it computed for a home that has gone, by the path of an epoch: `LayersKV`.

    It stays until `CloseStage`. Raises `StateError` where there is nothing, or the path here is another.
    """

    home: str
    epoch: int


@dataclass(frozen=True)
class BeginExchange:
    """Note from now on which blocks are written; answers with what `PrepareLayers` gets."""

    shards: tuple[int, ...]
    hurried: bool = False
    """Whether steps are short until it ends: requests wait for that."""


@dataclass(frozen=True)
class PrepareLayers:
    """Have memory for shards of a home that come here, its own ones too. Raises `CapacityError`."""

    home: str
    shards: tuple[int, ...]
    exchange: Any = field(repr=False, hash=False)
    """What the home answered to `BeginExchange`."""
    coordinated: bool = True
    """Part by part, behind what the rank computes."""
    hurried: bool = False
    """Whether steps are short meanwhile."""


@dataclass(frozen=True)
class CopyLayers:
    """Copy blocks of shards that come here; answers with the bytes."""

    home: str
    shards: tuple[int, ...]
    source: LayersKV
    blocks: tuple[tuple[int, ...], ...] = field(repr=False)
    """Of each group."""
    coordinated: bool = True
    """In chunks, behind what the rank computes."""


@dataclass(frozen=True)
class KeepFull:
    """Refuse what would take the full weights of these layers away, and of no others: they are computed in parts."""

    layers: frozenset[int]


@dataclass(frozen=True)
class SetCopies:
    """Share requests out among so many copies of the layers, all of which are where these are now: `LayerPath`."""

    copies: int


@dataclass(frozen=True)
class PauseSteps:
    """Begin no step until `ResumeSteps`; answered when none is in flight. Requests wait meanwhile, new ones too."""


@dataclass(frozen=True)
class ResumeSteps:
    """Begin steps again; if they were not paused, nothing happens."""


@dataclass(frozen=True)
class WrittenBlocks:
    """Of each group, the blocks that were written since the last time; it waits for no step."""


@dataclass(frozen=True)
class FlipLayers:
    """Pause the engine between two steps, have what was written last copied, and go on by another path: `Flipped`.

    The exchange ends with it, unless it fails.
    """

    path: LayerPath
    sources: Mapping[Way, LayersKV] = field(default_factory=dict)
    """Where what goes from one rank to another lies, as it was told last; of what is missing the home asks."""
    hurried: bool = False
    """Whether steps are short, and wait a little longer, so that it takes one pause instead of three: requests wait
    for its end."""


@dataclass(frozen=True)
class EndExchange:
    """Note no more which blocks are written: the layers stay where they are."""


@dataclass(frozen=True)
class GiveUpLayers:
    """Free the memory of shards of a home that do not come here after all."""

    home: str
    shards: tuple[int, ...]


@dataclass(frozen=True)
class Recover:
    """Go on without a rank that was lost, with all layers at home again: the tokens that are computed anew.

    The weights of shards that were dropped come back first: from ranks that have them, else from the checkpoint.
    """

    lost: str
    memories: Mapping[str, KVSource] = field(default_factory=dict, hash=False)
    """Of ranks that are gone, what can still be read."""
    weights: tuple[tuple[tuple[int, ...], WeightsSource], ...] = ()
    """Shards, and where another rank has them."""


@dataclass(frozen=True)
class WeightsOf:
    """Where the weights of shards lie in this rank's memory: `WeightsSource`."""

    shards: tuple[int, ...]


@dataclass(frozen=True)
class WeightDigests:
    """Checksums of the weights of shards as they were wrapped: {shard: int}. Needed before they can be dropped."""

    shards: tuple[int, ...]


PeerQuestion = OpenPeers | MeetPeers | LosePeer
"""Answered at once, whatever else is being done."""
StageQuestion = (
    OpenStage
    | AttachStage
    | DetachStage
    | CloseStage
    | MeasureRoom
    | SetCap
    | CapReached
    | Allot
    | LayersMemory
    | KeptLayers
    | BeginExchange
    | PrepareLayers
    | CopyLayers
    | KeepFull
    | SetCopies
    | PauseSteps
    | ResumeSteps
    | WrittenBlocks
    | FlipLayers
    | EndExchange
    | GiveUpLayers
    | Recover
)
