"""What a fleet knows of a group of instances: who computes which layers of it, and what changes that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from elastic import clock
from elastic.cluster.fleet.groups.results import GroupStatus
from elastic.cluster.fleet.records.memory_file import HeldMemory
from elastic.engines.pipeline.path import LayerPath
from elastic.planning.sharding.numbers import whole_layers


class LayerFlip(NamedTuple):
    """Shards of one instance that another rank computes from then on."""

    home: str
    shards: tuple[int, ...]
    """Of one layer or several, all or some of each."""
    source: str
    target: str


@dataclass(frozen=True)
class Shape:
    """Who computes what of a group, and who has which weights."""

    paths: Mapping[str, LayerPath] = field(hash=False)
    """Of each instance, by its home."""
    weights: Mapping[str, frozenset[int]] = field(hash=False)
    """Rank -> the shards whose weights it has."""
    members: tuple[str, ...] = field(init=False)
    """The ranks, each the home of an instance."""
    layers: int = field(init=False)
    """How many decoder layers there are."""
    shards: int = field(init=False)
    """How many shards each layer has."""
    numbers: int = field(init=False)
    """How many shards a copy of the layers has, numbered from 0."""

    def __post_init__(self) -> None:
        """Take the sizes from a path: they are those of all."""
        path = next(iter(self.paths.values()))
        sizes = {"layers": path.layers, "shards": path.shards, "numbers": path.numbers}
        for name, value in {"members": tuple(self.paths), **sizes}.items():
            object.__setattr__(self, name, value)

    def altered(
        self, paths: Mapping[str, LayerPath] | None = None, weights: Mapping[str, frozenset[int]] | None = None
    ) -> Shape:
        """Return the shape in which these paths are others, and these ranks have other weights."""
        return Shape({**self.paths, **(paths or {})}, {**self.weights, **(weights or {})})

    @property
    def apart(self) -> bool:
        """Whether each instance computes all of its layers itself."""
        return not any(path.helpers for path in self.paths.values())

    @property
    def tp(self) -> int:
        """How many ranks share a copy of a layer, at the most."""
        return max(len(copy) for path in self.paths.values() for i in range(self.layers) for copy in path.copies_of(i))

    def units(self) -> tuple[tuple[str, ...], ...]:
        """Return the members that compute layers of each other, together; one that does not by itself."""
        units = {rank: {rank} for rank in self.members}
        for home, path in self.paths.items():
            for rank in path.helpers:
                units[home] |= units[rank]
                units.update(dict.fromkeys(units[home], units[home]))
        ordered = (tuple(rank for rank in self.members if rank in unit) for unit in units.values())
        return tuple(dict.fromkeys(ordered))

    def shards_at(self, rank: str) -> dict[str, tuple[int, ...]]:
        """Return what a rank computes: home -> shards."""
        return {home: shards for home, path in self.paths.items() if (shards := path.shards_of(rank))}

    def in_parts(self, rank: str) -> frozenset[int]:
        """Return the layers that a rank computes together with others, for an instance."""
        layers = range(self.layers)
        copies = ((layer, copy) for path in self.paths.values() for layer in layers for copy in path.copies_of(layer))
        return frozenset(layer for layer, copy in copies if len(copy) > 1 and rank in copy)

    def needs(self, rank: str) -> frozenset[int]:
        """Return the shards whose weights a rank needs."""
        return frozenset(shard % self.numbers for shards in self.shards_at(rank).values() for shard in shards)

    def after(self, flip: LayerFlip, wanted: Mapping[str, frozenset[int]]) -> Shape:
        """Return the shape after a flip, when its source has dropped what it neither needs nor wants."""
        path = self.paths[flip.home].redirected(dict.fromkeys(flip.shards, flip.target))
        shape = self.altered({flip.home: path}, {flip.target: self.weights[flip.target].union(self.weights_of(flip))})
        return shape.altered(weights={flip.source: shape.kept(flip.source, wanted)})

    def weights_of(self, flip: LayerFlip) -> frozenset[int]:
        """Return the shards whose weights a flip needs at its target: the same for all copies of a layer."""
        numbers = self.numbers
        return frozenset(shard % numbers for shard in flip.shards)

    def kept(self, rank: str, wanted: Mapping[str, frozenset[int]]) -> frozenset[int]:
        """Return the shards of a rank that it needs, or wants, of those that it has."""
        return self.weights[rank] & (self.needs(rank) | wanted[rank])

    def leaving(self, target: Shape) -> dict[str, frozenset[int]]:
        """Return the shards of each rank whose weights are gone when the group has another shape."""
        return {rank: have - target.needs(rank) - target.weights[rank] for rank, have in self.weights.items()}


@dataclass(eq=False)
class Group:
    """Instances that compute layers of each other. Changed by one verb at a time; records are replaced as a whole."""

    shape: Shape
    alone: Mapping[str, int]
    """Home -> the sectors that it has by itself."""
    caps: Mapping[str, int | None]
    """Home -> the cap that is in force."""
    stages: set[tuple[str, str]] = field(default_factory=set)
    """(home, rank): connections that are open."""

    compared: bool = False
    """Whether the weights of its ranks are known to be equal."""
    staged: Mapping[str, int] = field(default_factory=dict)
    """Home -> the cap that it has by itself, if it keeps room for layers of others then."""
    told: Mapping[str, int] = field(default_factory=dict)
    """The blocks that instances said they could have when caps were last in order: fewer, and a limit has fallen."""
    memories: dict[str, HeldMemory] = field(default_factory=dict)
    """Of its ranks, what can be read also when they have gone; given back by `close`."""
    killed: set[str] = field(default_factory=set)
    """Ranks that have gone without giving anything back."""

    def __post_init__(self) -> None:
        self.members = self.shape.members
        """The ranks: other ones are another group."""

    def part_of(self, members: tuple[str, ...]) -> Group:
        """Return the group of some of the members, of whom no other one computes a layer, with what is held of them."""
        shape, stages = self.shape, {stage for stage in self.stages if set(stage) <= set(members)}
        return Group(
            Shape({name: shape.paths[name] for name in members}, {name: shape.weights[name] for name in members}),
            {name: self.alone[name] for name in members},
            {name: self.caps[name] for name in members},
            stages,
            self.compared,
            self.staged,
            {name: self.told[name] for name in members if name in self.told},
            {name: self.memories.pop(name) for name in members if name in self.memories},
            self.killed.intersection(members),
        )

    def close(self) -> None:
        """Hold no memory any more. Can be called twice."""
        while self.memories:
            self.memories.popitem()[1].close()

    def caps_in_force(self) -> dict[str, int]:
        """Return the most sectors of each instance."""
        return {home: self.alone[home] if cap is None else cap for home, cap in self.caps.items()}

    def status(self) -> GroupStatus:
        """Return what `Fleet.groups` says of it."""
        shape = self.shape
        shards = {rank: tuple(sorted(have)) for rank, have in shape.weights.items()}
        keeps = {rank: whole_layers(have, shape.shards) for rank, have in shards.items()}
        return GroupStatus(self.members, dict(shape.paths), keeps, dict(self.caps), dict(self.alone), shape.tp, shards)


class RankClaims:
    """Who changes which ranks: a verb its own, a repair those of a group that has lost one, and nobody both."""

    def __init__(self) -> None:
        self._lock = clock.current().lock()
        self._changed = clock.current().condition(self._lock)
        self._claimed: frozenset[str] = frozenset()

    @contextmanager
    def of(self, ranks: Iterable[str]) -> Iterator[None]:
        """Have some ranks to oneself, as soon as nobody else has one of them."""
        names = frozenset(ranks)
        with self._lock:
            self._changed.wait_for(lambda: names.isdisjoint(self._claimed))
            self._claimed |= names
        try:
            yield
        finally:
            with self._lock:
                self._claimed -= names
                self._changed.notify_all()


@dataclass(frozen=True)
class Deadline:
    """When something must have been done."""

    timeout_s: float
    began_s: float = field(default_factory=clock.now)

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return clock.now() - self.began_s

    def wait(self, seconds: float) -> bool:
        """Wait a little; return False if there is no time left."""
        left = self.timeout_s - self.seconds
        if left <= 0:
            return False
        clock.sleep(min(seconds, left))
        return True
