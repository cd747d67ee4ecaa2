"""Who computes which layers of a group, and what changes when a layer goes to another rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from elastic.engines.pipeline.path import LayerPath


class LayerFlip(NamedTuple):
    """Shards of one instance that another rank computes from then on."""

    home: str
    shards: tuple[int, ...]
    """Of one layer or several, all or some of each."""
    source: str
    target: str

    def with_more(self, shards: tuple[int, ...]) -> LayerFlip:
        """Return the flip of further shards, too."""
        return self._replace(shards=(*self.shards, *shards))


@dataclass(frozen=True)
class Shape:
    """Who computes what of a group, and who has which weights."""

    paths: Mapping[str, LayerPath] = field(hash=False)
    """Of each instance, by its home."""
    weights: Mapping[str, frozenset[int]] = field(hash=False)
    """Rank -> the shards whose weights it has."""

    @property
    def layers(self) -> int:
        """How many decoder layers there are."""
        return next(iter(self.paths.values())).layers

    @property
    def shards(self) -> int:
        """How many shards each layer has."""
        return next(iter(self.paths.values())).shards

    @property
    def numbers(self) -> int:
        """How many shards a copy of the layers has, numbered from 0."""
        return self.layers * self.shards

    @property
    def members(self) -> tuple[str, ...]:
        """The ranks, each the home of an instance."""
        return tuple(self.paths)

    @property
    def apart(self) -> bool:
        """Whether each instance computes all of its layers itself."""
        return not any(path.guests for path in self.paths.values())

    @property
    def tp(self) -> int:
        """How many ranks share a copy of a layer, at the most."""
        return max(len(copy) for path in self.paths.values() for i in range(self.layers) for copy in path.copies_of(i))

    @property
    def has_twice(self) -> bool:
        """Whether several ranks have the weights of a shard."""
        return sum(map(len, self.weights.values())) > len(frozenset().union(*self.weights.values()))

    def units(self) -> tuple[tuple[str, ...], ...]:
        """Return the members that compute layers of each other, together; one that does not by itself."""
        units = {rank: {rank} for rank in self.members}
        for home, path in self.paths.items():
            for rank in path.guests:
                units[home] |= units[rank]
                units.update(dict.fromkeys(units[home], units[home]))
        ordered = (tuple(rank for rank in self.members if rank in unit) for unit in units.values())
        return tuple(dict.fromkeys(ordered))

    def shards_at(self, rank: str) -> dict[str, tuple[int, ...]]:
        """Return what a rank computes: home -> shards."""
        return {home: shards for home, path in self.paths.items() if (shards := path.shards_of(rank))}

    def needs(self, rank: str) -> frozenset[int]:
        """Return the shards whose weights a rank needs."""
        return frozenset(shard % self.numbers for shards in self.shards_at(rank).values() for shard in shards)

    def after(self, flip: LayerFlip, wanted: Mapping[str, frozenset[int]]) -> Shape:
        """Return the shape after a flip, when its source has dropped what it neither needs nor wants."""
        paths = {**self.paths, flip.home: self.paths[flip.home].moved(flip.shards, flip.target)}
        weights = {**self.weights, flip.target: self.weights[flip.target].union(self.weights_of(flip))}
        shape = Shape(paths, weights)
        return replace(shape, weights={**weights, flip.source: shape.kept(flip.source, wanted)})

    def weights_of(self, flip: LayerFlip) -> frozenset[int]:
        """Return the shards whose weights a flip needs at its target: the same for all copies of a layer."""
        numbers = self.numbers
        return frozenset(shard % numbers for shard in flip.shards)

    def kept(self, rank: str, wanted: Mapping[str, frozenset[int]]) -> frozenset[int]:
        """Return the shards of a rank that it needs, or wants, of those that it has."""
        return self.weights[rank] & (self.needs(rank) | wanted[rank])
