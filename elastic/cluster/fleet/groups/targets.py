"""What a group is to become: which shards of layers are computed where, and who keeps which weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from elastic.cluster.control.stage_questions import Room
from elastic.cluster.fleet.groups.group import Shape
from elastic.engines.pipeline.path import LayerPath
from elastic.errors import ConfigError, require
from elastic.planning.arrangement.drop import GroupPlan
from elastic.planning.arrangement.stages import Held
from elastic.planning.sharding.bounds import is_degree
from elastic.planning.sharding.numbers import by_layer, of_layers, whole_layers
from elastic.planning.sharding.share import Share


def planned_shape(now: Shape, plan: GroupPlan) -> Shape:
    """Return the shape that a plan asks for: each instance computes what its rank keeps, stages the rest.

    Ranks that share layers each keep their part of them. The plan has all of its ranks, as `of_ranks` returns it.
    """
    alone = {unit[0] for unit in sharing(now.paths) if len(unit) == 1}
    kept = zip(plan.members, plan.keeps, strict=True)
    keeps = {
        name: frozenset(of_layers(layers, now.shards) if name in alone else _part_of(now, name, layers))
        for name, layers in kept
    }
    stages: dict[int, list[str]] = {}
    for name, run in zip(plan.members, plan.stages, strict=True):
        for layer in run:
            stages.setdefault(layer, []).append(name)
    return shape_keeping(now, keeps, stages)


def sharing(paths: Mapping[str, LayerPath]) -> tuple[tuple[str, ...], ...]:
    """Return the ranks that share layers with each other, together, in their order; one that shares none by itself."""
    units = {rank: {rank} for rank in paths}
    for holders in {holders for path in paths.values() for holders, _ in path.runs}:
        joined = set[str]().union(*(units[rank] for rank in holders))
        units.update(dict.fromkeys(joined, joined))
    return tuple(dict.fromkeys(tuple(rank for rank in paths if rank in unit) for unit in units.values()))


def held(paths: Mapping[str, LayerPath], weights: Mapping[str, Collection[int]]) -> tuple[Held, ...]:
    """Return the whole layers of each rank, and of those that share layers together, in the name of the first.

    `weights`: rank -> the shards that it has.
    """
    members = []
    for unit in sharing(paths):
        have = frozenset[int]().union(*(weights[rank] for rank in unit))
        members.append(Held(unit[0], frozenset(whole_layers(have, paths[unit[0]].shards))))
    return tuple(members)


def of_ranks(plan: GroupPlan, units: Iterable[tuple[str, ...]]) -> GroupPlan:
    """Return a plan in which each member stands for itself alone: all ranks that share layers with one do as it does.

    `units` are those that share layers.
    """
    of_rank = {rank: unit for unit in units for rank in unit}
    does: dict[str, int] = {}  # rank -> the number of its member
    for number, name in enumerate(plan.members):
        for rank in of_rank.get(name, (name,)):
            does.setdefault(rank, number)
    keeps, stages = tuple(plan.keeps[i] for i in does.values()), tuple(plan.stages[i] for i in does.values())
    return replace(plan, members=tuple(does), keeps=keeps, stages=stages)


def dropped_by_hand(now: Shape, layers: Mapping[str, Collection[int]]) -> Shape:
    """Return the shape in which ranks have dropped these layers. Raises `ConfigError` for layers that none keeps."""
    for rank, dropped in layers.items():
        require_layers(now.layers, rank, sorted(dropped))
    gone = {rank: frozenset(of_layers(dropped, now.shards)) for rank, dropped in layers.items()}
    return shape_keeping(now, {rank: have - gone.get(rank, frozenset()) for rank, have in now.weights.items()}, {})


def shape_keeping(now: Shape, keeps: Mapping[str, frozenset[int]], stages: Mapping[int, Collection[str]]) -> Shape:
    """Return the shape in which ranks keep just these weights.

    What the rank of an instance lacks of a layer is computed where the rest of it is, by the ranks of the layer's
    stage, or else by who has fewest so far: by one rank, if one has all of the layer. Raises `ConfigError` if nobody
    keeps a shard.
    """
    owners: list[str] = []
    for layer in range(now.layers):
        shards = of_layers((layer,), now.shards)
        stage = {rank: keeps[rank] for rank in stages.get(layer, ())}
        has_all = frozenset[int]().union(*stage.values()).issuperset(shards)
        owners.extend(_owners(shards, stage if has_all else keeps, owners))
    paths = {}
    for home, path in now.paths.items():
        ranks = []
        for layer in range(now.layers):
            shards = of_layers((layer,), now.shards)
            shared = not keeps[home].isdisjoint(shards)
            ranks += [_rank_of(shard, path, keeps, owners[shard], shared=shared) for shard in shards]
        paths[home] = replace(path, ranks=tuple(ranks) * path.copies)
    return Shape(paths, dict(keeps))


def units_of(members: Sequence[str], tp: int) -> tuple[tuple[str, ...], ...]:
    """Put ranks together that are to share layers, in their order."""
    if len(members) % tp:
        raise ConfigError(
            f"reshard: {', '.join(members)} are {len(members)} ranks, which compute layers together or were named; "
            f"tp={tp} needs a multiple of {tp}"
        )
    return tuple(tuple(members[first : first + tp]) for first in range(0, len(members), tp))


def require_shards(rooms: Mapping[str, Room], tp: int) -> None:
    """Raise `ConfigError` for layers that cannot be shared by so many ranks."""
    require(type(tp) is int and is_degree(tp), "tp", tp, "a power of two")
    for name, room in rooms.items():
        if room.path.shards % tp:
            cut = f"in {room.path.shards} shards" if room.path.shards > 1 else "not cut"
            raise ConfigError(
                f"tp={tp}: each layer of rank {name!r} is {cut}; start the fleet with shards={tp}, or more"
            )


def shared_out(now: Shape, shares: Mapping[str, Share]) -> Shape:
    """Return the shape in which ranks have their shares of the model, and each instance goes by all of them."""
    keeps = {rank: share.shards_of(now.layers, now.shards) for rank, share in shares.items()}
    return shape_keeping(now, {**now.weights, **keeps}, {})


def sharded(now: Shape, units: Iterable[Sequence[str]]) -> Shape:
    """Return the shape in which the ranks of each unit share every layer evenly, and keep just that of the weights.

    Each has the same part of all layers: one that it has now, if it can be. Instances of other ranks stay as they are.
    """
    paths, weights = dict(now.paths), dict(now.weights)
    for unit in units:
        size, left, ranks = now.shards // len(unit), list(unit), []
        for first in range(0, now.shards, size):
            parts = range(first, first + size)
            shards = frozenset(layer * now.shards + part for layer in range(now.layers) for part in parts)
            rank = max(left, key=lambda rank: len(now.weights[rank] & shards))
            left.remove(rank)
            ranks += [rank] * size
            weights[rank] = shards
        for rank in unit:
            path = now.paths[rank]
            paths[rank] = replace(path, ranks=tuple(ranks) * now.layers * path.copies)
    return Shape(paths, weights)


def restored(now: Shape, *, go_on_sharing: bool) -> Shape:
    """Return the shape in which nothing is dropped: each instance computes all of its layers itself.

    With `go_on_sharing` ranks that share layers go on to.
    """
    return sharded(now, sharing(now.paths) if go_on_sharing else [(rank,) for rank in now.members])


def migrated(now: Shape, home: str, layers: Sequence[int], rank: str) -> Shape:
    """Return the shape in which a rank computes these layers of an instance. Who has weights keeps them."""
    path, shards = now.paths[home], _some_shards(now, home, layers)
    ranks = tuple(rank if shard % now.numbers in shards else other for shard, other in enumerate(path.ranks))
    return now.altered({home: replace(path, ranks=ranks)}, {rank: now.weights[rank] | shards})


def replicated(now: Shape, home: str, layers: Collection[int], rank: str) -> Shape:
    """Return the shape in which a rank has a second copy of these layers of an instance, for half of its requests."""
    path, shards = now.paths[home], _some_shards(now, home, layers)
    first, second = path.of_copy(0).ranks, path.of_copy(path.copies - 1).ranks
    for shard in sorted(shards):
        if rank == first[shard] or first[shard] != second[shard]:
            has = f"is computed by {first[shard]!r}" + f" and {second[shard]!r}" * (first[shard] != second[shard])
            raise ConfigError(
                f"layers: layer {shard // now.shards} of {home!r} {has}; evict its replica, or name another"
            )
    ranks = (*first, *(rank if shard in shards else other for shard, other in enumerate(second)))
    return now.altered({home: replace(path, ranks=ranks, copies=2)}, {rank: now.weights[rank] | shards})


def evicted(now: Shape, home: str, layers: Collection[int]) -> Shape:
    """Return the shape in which layers of an instance have no second copy. Who has weights keeps them."""
    path, shards = now.paths[home], frozenset(of_layers(layers, now.shards))
    first = path.of_copy(0).ranks
    ranks = tuple(
        first[shard % now.numbers] if shard % now.numbers in shards else other for shard, other in enumerate(path.ranks)
    )
    return now.altered({home: replace(path, ranks=ranks)})


def require_layers(count: int, rank: str, layers: Iterable[int]) -> None:
    """Raise `ConfigError` for layers that a rank's model of so many has not."""
    if wrong := [layer for layer in layers if not 0 <= layer < count]:
        raise ConfigError(f"layers: rank {rank!r} has no layer {wrong[0]}; its model has {count}")


def _some_shards(now: Shape, home: str, layers: Collection[int]) -> frozenset[int]:
    """Return the shards of layers of an instance. Raises `ConfigError` for none, and for those that it has not."""
    if not layers:
        raise ConfigError("layers=() names none; name one at least")
    require_layers(now.layers, home, layers)
    return frozenset(of_layers(layers, now.shards))


def _part_of(now: Shape, rank: str, layers: Iterable[int]) -> Iterator[int]:
    """Yield a rank's shards of layers: those that it has, and of others the same parts."""
    have = by_layer(now.weights[rank], now.shards)
    usual = sorted({part for parts in have.values() for part in parts})
    return (layer * now.shards + part for layer in layers for part in have.get(layer, usual))


def _owners(shards: Sequence[int], keeps: Mapping[str, frozenset[int]], before: Sequence[str]) -> list[str]:
    """Return who computes the shards of a layer for those that have them not. `before` are those of other layers."""
    whole = [rank for rank in keeps if keeps[rank].issuperset(shards)]
    owners: list[str] = []
    for shard in shards:
        holders = whole or [rank for rank in keeps if shard in keeps[rank]]
        if not holders:
            layer = shard // len(shards)
            raise ConfigError(f"no rank of {', '.join(keeps)} would keep layer {layer}; one must: name one more rank")
        work = [*before, *owners]
        owner = min(holders, key=work.count)
        if whole:
            return [owner] * len(shards)
        owners.append(owner)
    return owners


def _rank_of(shard: int, path: LayerPath, keeps: Mapping[str, frozenset[int]], owner: str, *, shared: bool) -> str:
    """Return who computes a shard of an instance; `shared`: whether its rank has a part of the layer itself."""
    if shard in keeps[path.home]:
        return path.home
    now = path.ranks[shard]
    return now if shared and shard in keeps[now] else owner
