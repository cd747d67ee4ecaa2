"""Scale up by replicas of layers: the loop of algorithm 1. (CoCoServe, section 4.1)

Its weakness: where only several replicas together pay, it finds none; `elastic.planning.local_search` looks at those.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby

from elastic.planning.incremental_cost import IncrementalCost
from elastic.planning.placement import PlaceCapacity, Places, ResourceDemand

GAIN = 1e-9
"""Share of the cost; a change that saves less is not worth it."""


def add_replicas(
    present: IncrementalCost, needs: Sequence[ResourceDemand], places: Sequence[PlaceCapacity]
) -> IncrementalCost:
    """Add each replica that lowers the cost, candidates by continuity; returns `present`. No margin is filled."""
    kinds = set(needs)
    for place in places:
        for layer in candidates(present.placement.layers, kinds, place):
            if present.total(*present.sums_with(layer, place.name)) < present.cost * (1 - GAIN):
                present.add(layer, place.name)
    return present


def candidates(layers: Sequence[Places], needs: Collection[ResourceDemand], place: PlaceCapacity) -> list[int]:
    """Return max_replicas layers that a place has not, by continuity: of the longest run first, ties by index."""
    most = min(map(place.replicas, needs), default=0)
    groups = groupby(range(len(layers)), key=lambda layer: place.name in layers[layer])
    runs = [list(run) for has, run in groups if not has]
    runs.sort(key=len, reverse=True)  # stable: ties stay by index
    return [layer for run in runs for layer in run][:most]
