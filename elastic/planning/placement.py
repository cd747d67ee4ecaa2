"""Records of where decoder layers are (their own places and those of their replicas) and of what places offer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from elastic.errors import ConfigError
from elastic.types import Action, Evict, Migrate, Replicate

Places = tuple[str, ...]
"""Of one layer: its own place, then those of its replicas by name."""


@dataclass(frozen=True)
class LayerRun:
    """Consecutive layers with the same places: nothing is exchanged between them."""

    layers: range
    places: Places


@dataclass(frozen=True)
class Placement:
    """P, for each decoder layer the places that have it, its own first. (CoCoServe, section 4.1)"""

    layers: tuple[Places, ...]

    def __post_init__(self) -> None:
        for index, places in enumerate(self.layers):
            if not places or len(set(places)) < len(places):
                raise ConfigError(f"layer {index} has the places {places}; it must have one at least, and each once")
        object.__setattr__(self, "layers", tuple((own, *sorted(others)) for own, *others in self.layers))

    @property
    def alone_at_home(self) -> Placement:
        """P0, the same without replicas."""
        return Placement(tuple(places[:1] for places in self.layers))

    @property
    def chain(self) -> tuple[Places, ...]:
        """The layers with what is before and after them: the whole batch, where the first and the last layer belong."""
        return (self.layers[0][:1], *self.layers, self.layers[-1][:1]) if self.layers else ()

    def runs(self) -> tuple[LayerRun, ...]:
        """Return the layers from first to last, in as few runs as possible."""
        runs, first = [], 0
        for places, same in groupby(self.layers):
            last = first + len(list(same))
            runs.append(LayerRun(range(first, last), places))
            first = last
        return tuple(runs)

    def at(self, place: str) -> tuple[int, ...]:
        """Return the layers that a place has, as their own or as replicas."""
        return tuple(index for index, places in enumerate(self.layers) if place in places)

    def after(self, action: Migrate | Replicate | Evict) -> Placement:
        """Return this placement with whole layers at another place, at one place more, or at one less.

        Where a layer moves to, a replica becomes the layer. Nothing is replicated twice, and no own place is evicted.
        The action's layers are to be some of this placement's: that is not checked.
        """
        place, layers = action.place, list(self.layers)
        for index in action.layers:
            own, *others = layers[index]
            rest = [other for other in others if other != place]
            if isinstance(action, Migrate):
                own = place
            elif isinstance(action, Replicate) and own != place:
                rest.append(place)
            layers[index] = (own, *rest)
        return Placement(tuple(layers))


def difference(before: Placement, after: Placement) -> tuple[Action, ...]:
    """Return the actions from one placement to another: first those that give room, then moves, then replicas."""
    pairs = list(enumerate(zip(before.layers, after.layers, strict=True)))
    moved = [(i, new[0]) for i, (old, new) in pairs if old[0] != new[0]]
    evicted = [(i, place) for i, (old, new) in pairs for place in old[1:] if place not in new]
    lost = [(i, new[0]) for i, (old, new) in pairs if new[0] in old[1:]]
    added = [(i, place) for i, (old, new) in pairs for place in new[1:] if place not in old[1:]]
    return (
        *(Evict(layers, place) for place, layers in _by_place([*evicted, *lost])),
        *(Migrate(layers, place) for place, layers in _by_place(moved)),
        *(Replicate(layers, place) for place, layers in _by_place(added)),
    )


def added_replicas(before: Placement, after: Placement) -> list[tuple[int, str]]:
    """List (layer, place) of the replicas that are in one placement and not in the other."""
    pairs = enumerate(zip(before.layers, after.layers, strict=True))
    return [(i, place) for i, (old, new) in pairs for place in new[1:] if place not in old]


def _by_place(pairs: Sequence[tuple[int, str]]) -> list[tuple[str, tuple[int, ...]]]:
    grouped: dict[str, list[int]] = {}
    for layer, place in pairs:
        grouped.setdefault(place, []).append(layer)
    return [(place, tuple(sorted(layers))) for place, layers in grouped.items()]


@dataclass(frozen=True)
class ResourceDemand:
    """r, the demand of one layer, or of a module of it, at a place. (Algorithm 1)"""

    nbytes: int
    """Weights."""
    compute: float = 0.0
    """Work a second, in the units of `PlaceCapacity.compute`."""
    kv_bytes: int = 0
    """Its KV cache under the present load; that of a replica is counted whole too, to be safe."""
    parts: Mapping[str, ResourceDemand] = field(default_factory=dict, hash=False)
    """Modules of the layer that can move alone, such as `mlp`: the first to move first."""

    @property
    def total_bytes(self) -> int:
        return self.nbytes + self.kv_bytes


@dataclass(frozen=True)
class PlaceCapacity:
    """The memory and the compute that a place offers."""

    name: str
    total_bytes: int
    free_bytes: int
    compute: float = 1.0
    """C, work a second when it has nothing else to do; any unit, the same for all places."""
    idle: float = 1.0
    """Share of it that nobody uses now, from 0 to 1."""
    margin: float = 0.1
    """Share of memory, and of compute, that planning leaves alone."""
    room_bytes: int = field(init=False, compare=False)
    """Bytes that may still be filled."""
    room_compute: float = field(init=False, compare=False)
    """Work a second that may still be asked for."""
    vacancy: float = field(init=False, compare=False)
    """Share that is free of whatever is scarcer, memory or compute."""

    def __post_init__(self) -> None:
        room_bytes = max(0, math.floor(self.free_bytes - self.margin * self.total_bytes))
        free = self.free_bytes / self.total_bytes if self.total_bytes else 0.0
        object.__setattr__(self, "room_bytes", room_bytes)
        object.__setattr__(self, "room_compute", max(0.0, (self.idle - self.margin) * self.compute))
        object.__setattr__(self, "vacancy", min(free, self.idle))

    def fits(self, need: ResourceDemand) -> bool:
        """Return whether a layer, or a module, still fits below the margin."""
        return need.total_bytes <= self.room_bytes and need.compute <= self.room_compute

    def replicas(self, need: ResourceDemand) -> int:
        """Return max_replicas = free / r, by memory and by compute. (Algorithm 1, line 3)"""
        counts = [self.room_bytes // need.total_bytes] if need.total_bytes else []
        counts += [math.floor(self.room_compute / need.compute + 1e-9)] if need.compute else []
        return min(counts, default=1 << 30)

    def having(self, taken: ResourceDemand, times: int = 1) -> PlaceCapacity:
        """Return the same place with so much taken; below zero: given back."""
        used = times * taken.compute / self.compute if self.compute else 0.0
        return replace(self, free_bytes=self.free_bytes - times * taken.total_bytes, idle=self.idle - used)


def occupied(
    rooms: Mapping[str, PlaceCapacity],
    replicas: Iterable[tuple[int, str]],
    needs: Sequence[ResourceDemand],
    *,
    times: int = 1,
) -> dict[str, PlaceCapacity]:
    """Return the places with these (layer, place) in them, or with `times=-1` without them."""
    after = dict(rooms)
    for layer, place in replicas:
        if place in after:
            after[place] = after[place].having(needs[layer], times)
    return after
