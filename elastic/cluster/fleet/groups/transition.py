"""The order in which layers of a group change their ranks, so that no rank ever needs more memory than it has.

Nothing may need room before something has made it. A layer that flips needs room at the rank that it goes to, for its
keys and values at the cap of its instance, and for its weights where they are not there; then it frees what it leaves.
So layers that leave one rank alternate with those that come to it; where even the first finds no room, caps fall.

What has room at the same time goes at the same time: several layers of an instance at one pause of it, and those of
several instances side by side. Each such round makes more room for the next one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import NamedTuple

from elastic.cluster.control.stage_questions import Room
from elastic.cluster.fleet.groups.group import LayerFlip, Shape
from elastic.engines.core.kv_state import KVFormat
from elastic.engines.pipeline.path import LayerPath
from elastic.errors import CapacityError
from elastic.planning.sharding.numbers import by_layer

HEADROOM = 1.25
"""The least that caps are lowered to for fewer rounds, in units of what live requests have and are promised."""

FlipRound = tuple[LayerFlip, ...]
"""Flips that go side by side: all of them have room before any of them has made some.

Those of one instance are one pause of it, at which no rank both gives and gets shards.
"""


@dataclass(frozen=True)
class Transition:
    """Flips in an order that works, while no instance has more sectors than its cap."""

    rounds: tuple[FlipRound, ...]
    caps: Mapping[str, int] = field(hash=False)

    @property
    def flips(self) -> tuple[LayerFlip, ...]:
        """All of them."""
        return tuple(flip for each in self.rounds for flip in each)


def most_coming(flips: Iterable[LayerFlip], shards: int) -> int:
    """Return how many layers, of so many shards, flips bring to one rank at the most."""
    layers: dict[str, set[tuple[str, int]]] = {}
    for flip in flips:
        layers.setdefault(flip.target, set()).update((flip.home, shard // shards) for shard in flip.shards)
    return max(map(len, layers.values()), default=0)


class _Held(NamedTuple):
    """What a rank has of the keys and values of an instance."""

    parts: frozenset[int]
    """Of the KV cache."""
    pages: list[int]
    """That a sector needs there, by group of layers; those for steps are in each."""


class Books:
    """The memory of a group's ranks, in pages. Ranks hold weights, and sectors of each instance whose layers they have.

    With several groups of layers a sector counts as one of the group that needs most pages of a rank: never too few.
    """

    def __init__(self, rooms: Mapping[str, Room], format: KVFormat, shape: Shape) -> None:
        self.rooms = rooms
        self._groups = [frozenset(parts) for parts, _ in format.groups]
        self._every = range(shape.layers * shape.shards)
        self._all = frozenset(self._every)
        self._layer = shape.shards  # of its shards
        self.pages = {rank: room.usable_pages + room.weights_of(shape.weights[rank]) for rank, room in rooms.items()}
        """For weights of decoder layers, keys and values, and what steps take that have these."""
        self._held: dict[tuple[str, LayerPath], _Held] = {}
        self._taken: dict[tuple[LayerFlip, LayerPath, frozenset[int]], tuple[int, int]] = {}

    def sector_pages(self, rank: str, shards: Iterable[int]) -> int:
        """Count the pages that a sector needs at a rank, in these shards: those of a part that several share once."""
        room = self.rooms[rank]
        parts = room.parts_of(shards)
        return max(self._by_group(room, parts)) + room.step_pages(len(parts))

    def free(self, rank: str, shape: Shape, caps: Mapping[str, int]) -> int:
        """Count the pages that are left at a rank when every instance has all of its cap."""
        held = sum(caps[home] * max(self._kv(rank, path).pages) for home, path in shape.paths.items())
        return self.pages[rank] - self.rooms[rank].weights_of(shape.weights[rank]) - held

    def best(self, flips: Iterable[LayerFlip], shape: Shape, caps: Mapping[str, int]) -> tuple[LayerFlip, int]:
        """Return the first of the flips that leave their target the most pages, and how many."""
        free = {rank: self.free(rank, shape, caps) for rank in self.pages}
        left = ((flip, free[flip.target] - self.needed(flip, shape, caps)) for flip in flips)
        return max(left, key=itemgetter(1))

    def needed(self, flip: LayerFlip, shape: Shape, caps: Mapping[str, int]) -> int:
        """Count the pages that a flip takes at its target; the same are asked for with one cap after another."""
        key = flip, shape.paths[flip.home], shape.weights[flip.target]
        if key not in self._taken:
            self._taken[key] = self._taken_by(flip, shape)
        each, weights = self._taken[key]
        return caps[flip.home] * each + weights

    def alone(self, home: str) -> int:
        """Count the sectors that an instance has by itself, with all weights there."""
        pages = self.pages[home] - self.rooms[home].weights_of(self._all)
        return min(self.rooms[home].most_sectors, max(0, pages) // self.sector_pages(home, self._every))

    def staged(self, home: str) -> int:
        """Count the sectors that an instance can have by itself with room left for a layer of another like it."""
        pages, every = self.pages[home] - self.rooms[home].weights_of(self._all), self._every
        return min(self.alone(home), max(0, pages) // (self.sector_pages(home, every) + self.layer_pages(home)))

    def layer_pages(self, rank: str) -> int:
        """Return the pages that a sector needs at a rank in the layer that needs most."""
        every, size, room = self._every, self._layer, self.rooms[rank]
        return max(max(self._by_group(room, room.parts_of(every[i : i + size]))) for i in every[::size])

    def caps(self, shape: Shape, *, staging: int = 0) -> dict[str, int]:
        """Return the most sectors for each instance: the same multiple of what it has alone, then what is left.

        Each rank keeps room for `staging` layers more of any of them, where all can serve beside these.
        """
        base = {home: self.alone(home) for home in shape.paths}
        if not any(base.values()):  # none has room by itself: they have equal shares
            base = dict.fromkeys(base, 1)
        none = dict.fromkeys(base, 0)
        free = {rank: self.free(rank, shape, none) for rank in self.pages}
        layer = {rank: staging * self.layer_pages(rank) for rank in self.pages}
        factor = math.inf
        for rank in self.pages:
            cost = sum(base[home] * self.sector_pages(rank, at) for home, at in shape.shards_at(rank).items())
            cost += max(base.values()) * layer[rank]
            factor = min(factor, max(0, free[rank]) / cost) if cost else factor
        caps = {home: min(self.rooms[home].most_sectors, int(count * factor)) for home, count in base.items()}
        for home, path in shape.paths.items():
            more = min(
                (self.free(rank, shape, caps) - max(caps.values()) * layer[rank])
                // (self.sector_pages(rank, path.shards_of(rank)) + layer[rank])
                for rank in dict.fromkeys(path.ranks)
            )
            caps[home] = min(self.rooms[home].most_sectors, caps[home] + max(0, more))
        return self.caps(shape) if staging and min(caps.values()) < len(self._groups) else caps

    def _kv(self, rank: str, path: LayerPath) -> _Held:
        """Return what a rank has of the keys and values of an instance; remembered, as plans ask again and again."""
        if (held := self._held.get((rank, path))) is None:
            room = self.rooms[rank]
            parts = frozenset(room.parts_of(path.shards_of(rank)))
            pages = [n + room.step_pages(len(parts)) for n in self._by_group(room, parts)]
            held = self._held[rank, path] = _Held(parts, pages)
        return held

    def _taken_by(self, flip: LayerFlip, shape: Shape) -> tuple[int, int]:
        """Count the pages that a flip takes at its target: for each sector of its instance, and for weights."""
        held, room, weights = self._kv(flip.target, shape.paths[flip.home]), self.rooms[flip.target], 0
        new = [part for part in room.parts_of(flip.shards) if part not in held.parts]
        more = max(a + b for a, b in zip(held.pages, self._by_group(room, new), strict=True)) - max(held.pages)
        for layer, parts in by_layer(shape.weights_of(flip), self._layer).items():
            first = layer * self._layer
            have = shape.weights[flip.target].intersection(range(first, first + self._layer))
            weights += room.weights_of(have.union(first + part for part in parts)) - room.weights_of(have)
        return more + room.step_pages(len(new), beside=len(held.parts)), weights

    def _by_group(self, room: Room, parts: Collection[int]) -> list[int]:
        """Return the pages of a sector in parts of the KV cache, for each group of layers."""
        return [sum(room.sector_pages[part] for part in parts if part in group) for group in self._groups]


def plan_transition(
    now: Shape, target: Shape, books: Books, caps: Mapping[str, int], layers_per_step: int | None = None
) -> Transition:
    """Order the flips from one shape to another, and say which caps leave them room: as high as may be.

    `caps` are those in force; `layers_per_step` is how many layers of an instance flip at one pause at the most, None:
    as many as there is room for. Raises `CapacityError` if an instance would have no sector at all.
    """
    final = books.caps(target)
    caps = {home: min(cap, final[home]) for home, cap in caps.items()}
    most = layers_per_step or len(now.paths[now.members[0]].ranks)
    while True:
        rounds, stuck = _walk(now, target, books, caps, partial(_round, most))
        if stuck is not None:
            rounds, stuck = _walk(now, target, books, caps, _single)
        if stuck is None:
            return Transition(tuple(rounds), caps)
        caps = _lowered(*stuck, books, caps)


def plans_of(
    now: Shape, target: Shape, books: Books, caps: Mapping[str, int], layers_per_step: int | None
) -> tuple[Transition, ...]:
    """Return what `plan_transition` does, and before it one with lower caps where these save rounds.

    What live requests have and are promised keeps `HEADROOM` for others that come meanwhile; whoever comes beyond that
    makes the first plan one that would wait for requests to end.
    """
    planned = plan_transition(now, target, books, caps, layers_per_step)
    needed = {home: math.ceil(HEADROOM * books.rooms[home].committed_sectors) for home in caps}
    lower = {home: min(cap, max(needed[home], cap // 2)) for home, cap in planned.caps.items()}
    if lower == planned.caps:
        return (planned,)
    quick = plan_transition(now, target, books, lower, layers_per_step)
    return (quick, planned) if quick.caps == lower and len(quick.rounds) < len(planned.rounds) else (planned,)


def flips_between(now: Shape, target: Shape) -> list[LayerFlip]:
    """List what changes its rank, each layer by itself: those of its shards that go the same way."""
    ways: dict[tuple[str, int, str, str], list[int]] = {}
    for home, path in now.paths.items():
        for shard, (source, goal) in enumerate(zip(path.ranks, target.paths[home].ranks, strict=True)):
            if source != goal:
                ways.setdefault((home, shard // path.shards, source, goal), []).append(shard)
    return [LayerFlip(home, tuple(shards), source, goal) for (home, _, source, goal), shards in ways.items()]


Stuck = tuple[Shape, LayerFlip, int]
"""A flip that has no room, and the pages that lack."""
RoundOf = Callable[[list[LayerFlip], Shape, Books, Mapping[str, int]], FlipRound]
"""Chooses what flips next, of single layers, the caps being these: at least one that has room, or nothing."""


def _walk(
    now: Shape, target: Shape, books: Books, caps: Mapping[str, int], round_of: RoundOf
) -> tuple[list[FlipRound], Stuck | None]:
    """Flip round by round, as long as there is room for one; return the rounds, and what is stuck."""
    shape = replace(now, weights={rank: now.kept(rank, target.weights) for rank in now.weights})
    left = flips_between(now, target)
    done: list[FlipRound] = []
    while left:
        chosen = round_of(left, shape, books, caps)
        if not chosen:
            best, pages = books.best(left, shape, caps)
            return done, (shape, best, -pages)
        for flip in chosen:
            shape = shape.after(flip, target.weights)
        gone = {(flip.home, shard) for flip in chosen for shard in flip.shards}
        left = [flip for flip in left if (flip.home, flip.shards[0]) not in gone]
        done.append(chosen)
    return done, None


def _single(left: list[LayerFlip], shape: Shape, books: Books, caps: Mapping[str, int]) -> FlipRound:
    """Choose the layer that leaves its target the most room, by itself."""
    best, pages = books.best(left, shape, caps)
    return (best,) if pages >= 0 else ()


def _round(most: int, left: list[LayerFlip], shape: Shape, books: Books, caps: Mapping[str, int]) -> FlipRound:
    """Choose flips of each instance in turn, of up to `most` layers of each, as long as all have room at once."""
    free = {rank: books.free(rank, shape, caps) for rank in books.pages}
    pauses = {home: _Pause(most, shape) for home in shape.paths}
    waiting = sorted(left, key=lambda flip: books.needed(flip, shape, caps) - free[flip.target])
    before = len(waiting) + 1
    while len(waiting) < before:
        before = len(waiting)
        for home, pause in pauses.items():
            for flip in [flip for flip in waiting if flip.home == home and pause.takes(flip)]:
                coming = pause.coming.get(flip.target)
                joined = flip if coming is None else coming._replace(shards=coming.shards + flip.shards)
                needed = books.needed(joined, shape, caps) - (books.needed(coming, shape, caps) if coming else 0)
                if needed <= free[flip.target]:
                    pause.add(flip, joined)
                    free[flip.target] -= needed
                    waiting.remove(flip)
                    break
    return tuple(flip for pause in pauses.values() for flip in pause.ways.values())


class _Pause:
    """What is chosen to flip at one pause of an instance: at most so many layers, of one copy of them."""

    def __init__(self, most: int, shape: Shape) -> None:
        self.coming: dict[str, LayerFlip] = {}  # rank -> all that it gets, whosever it was
        self._most, self._shards, self._numbers = most, shape.shards, shape.numbers
        self.ways: dict[tuple[str, str], LayerFlip] = {}
        """What is chosen, by source and target."""
        self._layers: set[int] = set()

    def takes(self, flip: LayerFlip) -> bool:
        """Return whether the flip of a layer can be at the same pause; there may be no room for it."""
        copies = {each.shards[0] // self._numbers for each in (flip, *self.ways.values())}
        if len(copies) > 1 or any(flip.source == target or flip.target == source for source, target in self.ways):
            return False
        return len(self._layers) < self._most or flip.shards[0] // self._shards in self._layers

    def add(self, flip: LayerFlip, coming: LayerFlip) -> None:
        """Have it be one more; `coming` is then all that its target gets."""
        way = (flip.source, flip.target)
        before = self.ways[way].shards if way in self.ways else ()
        self.ways[way] = flip._replace(shards=tuple(sorted(before + flip.shards)))
        self.coming[flip.target] = coming
        self._layers.add(flip.shards[0] // self._shards)


def _lowered(shape: Shape, flip: LayerFlip, lacking: int, books: Books, caps: Mapping[str, int]) -> dict[str, int]:
    """Lower the cap that then has the most slack, of the instances that have layers where a flip finds no room."""
    at = {**shape.shards_at(flip.target)}
    at[flip.home] = (*at.get(flip.home, ()), *flip.shards)
    lower = {home: caps[home] - -(-lacking // books.sector_pages(flip.target, shards)) for home, shards in at.items()}
    home = max(lower, key=lambda home: (lower[home] > 0, lower[home] - books.rooms[home].committed_sectors))
    if lower[home] <= 0:
        room, layer = books.rooms[flip.target], flip.shards[0] % shape.numbers // shape.shards
        raise CapacityError(
            f"rank {flip.target!r} has no room for layer {layer} of instance {flip.home!r}, "
            "however small the caches are; give the ranks more memory",
            requested_bytes=lacking * room.page_bytes,
            free_bytes=max(0, books.free(flip.target, shape, caps)) * room.page_bytes,
            total_bytes=books.pages[flip.target] * room.page_bytes,
        )
    return {**caps, home: lower[home]}
