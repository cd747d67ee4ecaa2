"""What a group is to become: whose layers are computed where, and who keeps which weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from elastic.cluster.fleet.groups.transition import Shape
from elastic.engines.pipeline.path import LayerPath
from elastic.errors import ConfigError
from elastic.planning.arrangement.drop import GroupPlan


def planned_shape(now: Shape, plan: GroupPlan) -> Shape:
    """Return the shape that a plan asks for: each instance computes what its rank keeps, stages the rest."""
    keeps = {name: frozenset(layers) for name, layers in zip(plan.members, plan.keeps, strict=True)}
    stages = {layer: name for name, run in zip(plan.members, plan.stages, strict=True) for layer in run}
    return shape_keeping(now, keeps, stages)


def dropped_by_hand(now: Shape, layers: Mapping[str, Collection[int]]) -> Shape:
    """Return the shape in which ranks have dropped these layers. Raises `ConfigError` for layers that none keeps."""
    for rank, dropped in layers.items():
        count = len(now.paths[rank].ranks)
        if wrong := sorted(set(dropped) - set(range(count))):
            raise ConfigError(f"layers: rank {rank!r} has no layer {wrong[0]}; its model has {count}")
    keeps = {rank: have - frozenset(layers.get(rank, ())) for rank, have in now.weights.items()}
    return shape_keeping(now, keeps, {})


def shape_keeping(now: Shape, keeps: Mapping[str, frozenset[int]], stages: Mapping[int, str]) -> Shape:
    """Return the shape in which ranks keep just these weights.

    An instance whose rank lacks a layer has it computed by the layer's stage, or else by who has fewest so far. Raises
    `ConfigError` if nobody keeps a layer.
    """
    count = len(next(iter(now.paths.values())).ranks)
    owners, work = [], dict.fromkeys(keeps, 0)
    for layer in range(count):
        holders = [rank for rank in keeps if layer in keeps[rank]]
        if not holders:
            raise ConfigError(f"no rank of {', '.join(keeps)} would keep layer {layer}; one must: name one more rank")
        stage = stages.get(layer)
        owner = stage if stage is not None and stage in holders else min(holders, key=work.__getitem__)
        work[owner] += 1
        owners.append(owner)
    paths = {}
    for home, path in now.paths.items():
        ranks = tuple(home if layer in keeps[home] else owner for layer, owner in enumerate(owners))
        paths[home] = path if path.ranks == ranks else LayerPath(home, ranks, path.epoch)
    return Shape(paths, dict(keeps))


def apart(now: Shape) -> Shape:
    """Return the shape in which each instance computes all of its layers itself."""
    count = len(next(iter(now.paths.values())).ranks)
    paths = {home: LayerPath(home, (home,) * count, path.epoch) for home, path in now.paths.items()}
    return Shape(paths, dict.fromkeys(now.weights, frozenset(range(count))))


def migrated(now: Shape, home: str, layers: Sequence[int], rank: str) -> Shape:
    """Return the shape in which a rank computes these layers of an instance. Who has weights keeps them."""
    path = now.paths[home]
    if wrong := [layer for layer in layers if not 0 <= layer < len(path.ranks)]:
        raise ConfigError(f"layers: {home!r} has no layer {wrong[0]}; its model has {len(path.ranks)}")
    ranks = tuple(rank if layer in set(layers) else other for layer, other in enumerate(path.ranks))
    paths = {**now.paths, home: LayerPath(home, ranks, path.epoch)}
    return Shape(paths, {**now.weights, rank: now.weights[rank] | frozenset(layers)})
