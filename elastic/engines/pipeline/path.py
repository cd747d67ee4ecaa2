"""Which ranks compute each layer of an instance's steps, and what one rank of it has to do in a step.

A layer is cut into shards, which are what changes its rank: parts of its feed-forward networks, and the keys and values
of some of its heads. Shard p of layer l has the number `l * shards + p`. A layer whose shards are at several ranks is
computed by all of them together (tensor parallelism); layers at one rank each are a pipeline.

Layers may have several copies, which share the requests: a replica at another rank is one (CoCoServe, section 3). The
numbers of copy k begin at `k * layers * shards`; weights, keys and values are numbered as those of the first copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise
from typing import NamedTuple

from elastic.errors import ConfigError
from elastic.planning.sharding.numbers import by_layer

Way = tuple[str, str]
"""From one rank to another."""


class ShardMove(NamedTuple):
    """Shards that another rank computes from then on."""

    shards: tuple[int, ...]
    source: str
    target: str


@dataclass(frozen=True)
class LayerPath:
    """The way of an instance's steps through its layers: embedding and head at home, each shard of a layer at one rank.

    The keys and values of a shard are where it is computed. Each instance of a fleet keeps its engine, its scheduler
    and its requests at home, whoever computes its layers: two instances that compute each other's layers are a pipeline
    of two stages (KunServe, section 4), and two that compute each other's shards are tensor-parallel (AMOEBA, section
    3), with a batch of each in flight.
    """

    home: str
    """The rank whose engine plans the steps, and samples."""
    ranks: tuple[str, ...]
    """Of each shard, the rank that computes it."""
    epoch: int = 0
    """Counts the paths of an instance: no step is computed by two of them."""
    shards: int = 1
    """Of each decoder layer."""
    copies: int = 1
    """Of all layers, each with a share of the requests. Where they are at the same ranks they are one."""

    def __post_init__(self) -> None:
        if not self.ranks:
            raise ConfigError("ranks=() is no path; name a rank for one layer at least")
        if self.epoch < 0:
            raise ConfigError(f"epoch={self.epoch} must be at least 0")
        if self.shards < 1 or self.copies < 1 or len(self.ranks) % (self.shards * self.copies):
            raise ConfigError(
                f"{len(self.ranks)} ranks are not those of whole layers of shards={self.shards}, copies={self.copies}"
            )

    @classmethod
    def alone(cls, home: str, layers: int, shards: int = 1) -> LayerPath:
        """Return the path of an instance that computes all of its layers itself."""
        return cls(home, (home,) * (layers * shards), shards=shards)

    @property
    def layers(self) -> int:
        """How many decoder layers there are."""
        return self.numbers // self.shards

    @property
    def numbers(self) -> int:
        """How many shards a copy has: weights, keys and values have the same numbers in all copies, below this."""
        return len(self.ranks) // self.copies

    @property
    def alike(self) -> bool:
        """Whether all copies are at the same ranks."""
        return self.ranks == self.ranks[: self.numbers] * self.copies

    @property
    def helpers(self) -> tuple[str, ...]:
        """The ranks that compute layers for its home, in the order of their first shards."""
        return tuple(rank for rank in dict.fromkeys(self.ranks) if rank != self.home)

    def ranks_of(self, layer: int) -> tuple[str, ...]:
        """Return the rank of each shard of a layer, of the first copy."""
        return self.ranks[layer * self.shards : (layer + 1) * self.shards]

    def copies_of(self, layer: int) -> tuple[tuple[str, ...], ...]:
        """Return the ranks that compute each different copy of a layer, in the order of their shards."""
        first = (self.of_copy(copy).holders(layer) for copy in range(self.copies))
        return tuple(dict.fromkeys(first))

    def of_copy(self, copy: int) -> LayerPath:
        """Return the way of the requests of one copy."""
        if self.copies == 1:
            return self
        ranks = self.ranks[copy * self.numbers : (copy + 1) * self.numbers]
        return LayerPath(self.home, ranks, self.epoch, self.shards)

    def with_copies(self, copies: int) -> LayerPath:
        """Return the next path, of so many copies at the ranks of the first. Raises `ConfigError` where one is not."""
        if not self.alike:
            raise ConfigError(f"copies={copies}: the copies of {self} are at other ranks; evict replicas first")
        return LayerPath(self.home, self.ranks[: self.numbers] * copies, self.epoch + 1, self.shards, copies)

    def holders(self, layer: int) -> tuple[str, ...]:
        """Return the ranks that compute a layer, of the first copy, each once, in the order of their first shards."""
        return tuple(dict.fromkeys(self.ranks_of(layer)))

    @cached_property
    def runs(self) -> tuple[tuple[tuple[str, ...], range], ...]:
        """The layers from first to last by the ranks that compute the first copy, in as few runs as possible."""
        runs, first = [], 0
        for ranks, same in groupby(map(self.holders, range(self.layers))):
            last = first + len(list(same))
            runs.append((ranks, range(first, last)))
            first = last
        return tuple(runs)

    @property
    def stages(self) -> int:
        """How many stages can compute different steps at a time: runs that share no rank with those before them."""
        stages: list[tuple[str, ...]] = []
        for ranks, _ in self.runs:
            if not any(set(ranks).intersection(stage) for stage in stages):
                stages.append(ranks)
        return len(stages)

    @cached_property
    def hops(self) -> int:
        """How often a step of the first copy waits for another rank: it begins and ends at home.

        Twice in a layer that is shared: for the heads of the others, and for what their parts of the network give.
        """
        holders = [self.holders(layer) for layer in range(self.layers)]
        hops = sum(not set(after) <= set(before) for before, after in pairwise(((self.home,), *holders, (self.home,))))
        return hops + 2 * sum(len(ranks) > 1 for ranks in holders)

    @cached_property
    def depth(self) -> float:
        """The layers that a step of the first copy takes one after another, of a shared one the largest part."""
        layers = [self.ranks_of(layer) for layer in range(self.layers)]
        return sum(max(map(ranks.count, set(ranks))) for ranks in layers) / self.shards

    def shards_of(self, rank: str) -> tuple[int, ...]:
        """Return the numbers of the shards that a rank computes, of all copies; with one shard and copy: its layers."""
        return self._shards.get(rank, ())

    @cached_property
    def _shards(self) -> Mapping[str, tuple[int, ...]]:
        """The shards of each rank: a path never changes."""
        shards: dict[str, list[int]] = {}
        for shard, rank in enumerate(self.ranks):
            shards.setdefault(rank, []).append(shard)
        return {rank: tuple(numbers) for rank, numbers in shards.items()}

    def __reduce__(self) -> tuple[type[LayerPath], tuple[object, ...]]:
        return LayerPath, (self.home, self.ranks, self.epoch, self.shards, self.copies)  # without what it has found out

    def redirected(self, ranks: Mapping[int, str]) -> LayerPath:
        """Return the next path, in which these ranks compute these shards: shard -> rank."""
        redirected = tuple(ranks.get(shard, rank) for shard, rank in enumerate(self.ranks))
        return LayerPath(self.home, redirected, self.epoch + 1, self.shards, self.copies)

    def moves_to(self, path: LayerPath) -> tuple[ShardMove, ...]:
        """Return what changes its rank in another path of the same layers."""
        ways: dict[Way, list[int]] = {}
        for shard, way in enumerate(zip(self.ranks, path.ranks, strict=True)):
            if way[0] != way[1]:
                ways.setdefault(way, []).append(shard)
        return tuple(ShardMove(tuple(shards), *way) for way, shards in ways.items())

    def plans(self, rank: str) -> tuple[StagePlan | None, ...]:
        """Return what a rank does in each step of each copy; None: it has no part in it."""
        paths = map(self.of_copy, range(self.copies))
        return tuple(path.plan(rank) if rank == self.home or rank in path.ranks else None for path in paths)

    def plan(self, rank: str) -> StagePlan:
        """Return what a rank does in each step, of the first copy. Raises `ConfigError` for one with no part in it."""
        parts = by_layer(self.of_copy(0).shards_of(rank), self.shards)
        own = {
            layer: LayerPart(shards, self.ranks_of(layer), len(shards) == self.shards)
            for layer, shards in parts.items()
        }
        if rank != self.home and not own:
            raise ConfigError(f"rank {rank!r} computes no layer of {self.home!r}; its steps go by {self.runs}")
        receives: dict[int, str] = {}
        sends: dict[int, tuple[str, ...]] = {}
        at = (*map(self.holders, range(self.layers)), (self.home,))  # hidden states ahead of each layer, and at the end
        for following, (holders, takers) in enumerate(pairwise(at), 1):
            new = tuple(other for other in takers if other not in holders)  # the first that has them sends
            if rank in new:
                receives[following] = holders[0]
            if new and rank == holders[0]:
                sends[following - 1] = new
        return StagePlan(rank, own, receives, sends, self.layers if rank == self.home else max(own))


@dataclass(frozen=True)
class LayerPart:
    """A rank's shards of a layer, and those of the others."""

    own: tuple[int, ...]
    """Its shards: 0 and so on within the layer."""
    ranks: tuple[str, ...]
    """Of each shard of the layer, the rank that computes it."""
    whole: bool
    """Whether the rank computes the layer by itself."""

    @cached_property
    def shards(self) -> Mapping[str, tuple[int, ...]]:
        """The shards of each rank of the layer, in the order of their first ones."""
        return {
            rank: tuple(shard for shard, other in enumerate(self.ranks) if other == rank)
            for rank in dict.fromkeys(self.ranks)
        }


@dataclass(frozen=True)
class StagePlan:
    """What one rank does in a step. Hidden states are [1, tokens, hidden size], of all tokens of the step."""

    rank: str
    layers: Mapping[int, LayerPart] = field(hash=False)
    """Those that it computes, whole or in part; it passes over the others."""
    receives: Mapping[int, str] = field(hash=False)
    """Layer -> the rank that sends the hidden states that it is given; the number of layers: those behind the last."""
    sends: Mapping[int, tuple[str, ...]] = field(hash=False)
    """Layer -> the ranks that get what it returns."""
    last: int
    """The last layer that it computes; at home the number of layers: norm and head follow."""

    def awaited_by(self, layer: int = 0) -> tuple[str, ...]:
        """Return the ranks that get something of this one in a layer of a step, or behind it."""
        others = [rank for index, part in self.layers.items() if index >= layer for rank in part.shards]
        others += [rank for index, ranks in self.sends.items() if index >= layer for rank in ranks]
        return tuple(rank for rank in dict.fromkeys(others) if rank != self.rank)
