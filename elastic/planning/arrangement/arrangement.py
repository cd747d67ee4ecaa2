"""An instance over several ranks: who has each layer, whole or in shards, and which copy computes a request."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from elastic.errors import ConfigError

Shards = tuple[str, ...]
"""The ranks that share one copy of a layer, in the order of their parts; of one rank: it has the whole layer."""
Copies = tuple[Shards, ...]
"""Copies of a layer, which share the requests."""
Assignment = Mapping[str, Sequence[int]]
"""Request -> for each layer, which of its copies computes it and has its keys and values."""


class CopyRun(NamedTuple):
    """Consecutive layers with the same copies: between them no hidden states go to another rank."""

    layers: range
    copies: Copies


@dataclass(frozen=True)
class Arrangement:
    """For each decoder layer its copies. Two plain instances in lockstep have `(("a",), ("b",))` for every layer.

    Raises `ConfigError` for layers without a copy, a rank that is twice in a layer, a number of shards that is no power
    of two, and a leader that has no layer.
    """

    layers: tuple[Copies, ...]
    leader: str
    """The rank whose engine plans the steps."""
    epoch: int = 0
    """Counts the arrangements of an instance: no step is computed by two of them."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("layers=() is no arrangement; name the copies of one layer at least")
        if self.epoch < 0:
            raise ConfigError(f"epoch={self.epoch} must be at least 0")
        for copies in dict.fromkeys(self.layers):
            _require_copies(copies, self.layers.index(copies))
        if self.leader not in self.ranks:
            raise ConfigError(f"leader={self.leader!r} has no layer; it must be one of {', '.join(self.ranks)}")

    @classmethod
    def alone(cls, layers: int, *shards: str) -> Arrangement:
        """Make the arrangement of a plain instance: one copy of every layer, led by its first rank."""
        return cls(((shards,),) * layers, shards[0] if shards else "")

    @classmethod
    def merged(cls, instances: Sequence[Arrangement]) -> Arrangement:
        """Return instances of the same layers in lockstep, led by the leader of the first: nothing moves by this.

        Raises `ConfigError` for none, for unlike numbers of layers, and for a rank that several have.
        """
        counts = sorted({len(instance.layers) for instance in instances})
        if len(counts) != 1:
            raise ConfigError(f"instances of {counts} layers cannot be merged; give instances of one model")
        columns = zip(*(instance.layers for instance in instances), strict=True)
        layers = tuple(tuple(shards for copies in layer for shards in copies) for layer in columns)
        return cls(layers, instances[0].leader, 1 + max(instance.epoch for instance in instances))

    @property
    def ranks(self) -> tuple[str, ...]:
        """All ranks, in the order of the layers."""
        return tuple(dict.fromkeys(rank for copies in self.layers for shards in copies for rank in shards))

    def part(self, ranks: Collection[str]) -> Arrangement:
        """Return the instance of some of the ranks, after a split: nothing moves by this.

        Raises `ConfigError` if a copy is shared with others, or if a layer has no copy among these ranks.
        """
        apart = [s for copies in self.layers for s in copies if 0 < len(set(s) & set(ranks)) < len(s)]
        if apart:
            raise ConfigError(f"the ranks {sorted(ranks)} share the copy {apart[0]} with others; reshard it first")
        layers = tuple(tuple(shards for shards in copies if shards[0] in ranks) for copies in self.layers)
        missing = [layer for layer, copies in enumerate(layers) if not copies]
        if missing:
            raise ConfigError(f"the ranks {sorted(ranks)} have no copy of the layers {missing}; restore them first")
        leader = self.leader if self.leader in ranks else layers[0][0][0]
        return Arrangement(layers, leader, self.epoch + 1)

    def changed(self, layers: Iterable[int], copies: Copies) -> Arrangement:
        """Return the next arrangement, in which some layers have other copies."""
        changes = dict.fromkeys(layers, copies)
        after = tuple(changes.get(index, before) for index, before in enumerate(self.layers))
        return Arrangement(after, self.leader, self.epoch + 1)

    def runs(self) -> tuple[CopyRun, ...]:
        """Return the layers from first to last, in as few runs as possible."""
        runs, first = [], 0
        for copies, same in groupby(self.layers):
            last = first + len(list(same))
            runs.append(CopyRun(range(first, last), copies))
            first = last
        return tuple(runs)

    def at(self, rank: str) -> tuple[int, ...]:
        """Return the layers of which a rank has a copy or a shard."""
        return tuple(i for i, copies in enumerate(self.layers) if any(rank in shards for shards in copies))

    def require_cuts(self, most: Sequence[int]) -> None:
        """Raise `ConfigError` if a layer has more shards than it can be cut into: `most` is by layer."""
        for layer, (copies, limit) in enumerate(zip(self.layers, most, strict=True)):
            for shards in copies:
                if len(shards) > limit:
                    raise ConfigError(f"layer {layer} is at {shards}, but can be cut into {limit} shards at most")


def _require_copies(copies: Copies, layer: int) -> None:
    if not copies or not all(isinstance(shards, tuple) and shards for shards in copies):
        raise ConfigError(f"layer {layer} has the copies {copies!r}; give one tuple of ranks at least")
    ranks = [rank for shards in copies for rank in shards]
    if len(set(ranks)) < len(ranks):
        raise ConfigError(f"layer {layer} has the copies {copies}; a rank may be in one of them, once")
    for shards in copies:
        if len(shards) & (len(shards) - 1):
            raise ConfigError(f"layer {layer} is in {len(shards)} shards at {shards}; give a power of two")


def assign(arrangement: Arrangement, homes: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Assign requests to the copies that their home ranks are in: request -> rank -> copy of each layer.

    Where a home has no part of a layer, the copy is that with the same index as in the layer before, or behind it.
    Raises `ConfigError` for a home that has no layer.
    """
    found: dict[str, tuple[int, ...]] = {}
    for home in dict.fromkeys(homes.values()):
        index = [next((i for i, s in enumerate(copies) if home in s), None) for copies in arrangement.layers]
        last = next((i for i in index if i is not None), None)
        if last is None:
            raise ConfigError(f"the home {home!r} has no layer; it must be one of {', '.join(arrangement.ranks)}")
        path = []
        for copies, own in zip(arrangement.layers, index, strict=True):
            last = own if own is not None else last % len(copies)
            path.append(last)
        found[home] = tuple(path)
    return {request: found[home] for request, home in homes.items()}
