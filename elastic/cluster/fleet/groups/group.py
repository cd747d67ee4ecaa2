"""What a fleet knows of a group of instances."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from elastic import clock
from elastic.cluster.fleet.groups.results import GroupStatus
from elastic.cluster.fleet.groups.shape import Shape
from elastic.cluster.fleet.records.memory_file import HeldMemory
from elastic.engines.core.kv_state import KVSource
from elastic.planning.sharding.numbers import whole_layers


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

    @property
    def members(self) -> tuple[str, ...]:
        """The ranks."""
        return self.shape.members

    def left(self) -> dict[str, KVSource]:
        """Return the memories of killed ranks."""
        return {rank: self.memories[rank].source for rank in self.killed if rank in self.memories}

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
        self._lock = clock.make_lock()
        self._changed = clock.make_condition(self._lock)
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


class Deadline:
    """When something must have been done."""

    def __init__(self, timeout_s: float) -> None:
        self.began_s = clock.now()
        self._until_s = self.began_s + timeout_s

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return clock.now() - self.began_s

    def wait(self, seconds: float) -> bool:
        """Wait a little; return False if there is no time left."""
        left = self._until_s - clock.now()
        if left <= 0:
            return False
        clock.sleep(min(seconds, left))
        return True
