"""Scale up by replicas of layers: algorithm 1 as printed. (CoCoServe, section 4.1)"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from elastic.planning.cost_model import CostModel
from elastic.planning.incremental_cost import IncrementalCost
from elastic.planning.placement import PlaceCapacity, Placement, Places, ResourceDemand

GAIN = 1e-9
"""Of the cost; what gains less gains nothing."""


def scale_up(
    placement: Placement,
    needs: Sequence[ResourceDemand],
    places: Sequence[PlaceCapacity],
    model: CostModel,
    t_up: float = 0.2,
) -> Placement:
    """Replicas at every place whose vacancy is above `t_up`: each that raises S, candidates by continuity.

    `needs` are of all layers. No place is filled beyond its margin. Its weakness: where only several replicas together
    pay, it finds none; `elastic.planning.local_search` looks at those too.
    """
    return add_replicas(IncrementalCost(model, placement), needs, eligible(places, t_up)).placement


def add_replicas(
    tally: IncrementalCost, needs: Sequence[ResourceDemand], places: Sequence[PlaceCapacity]
) -> IncrementalCost:
    """The same tally, with each replica that lowers the cost."""
    kinds = set(needs)
    for place in places:
        for layer in candidates(tally.layers, kinds, place):
            if tally.cost_with(layer, place.name) < tally.cost * (1 - GAIN):
                tally.add(layer, place.name)
    return tally


def eligible(places: Sequence[PlaceCapacity], t_up: float) -> list[PlaceCapacity]:
    """Those with a vacancy above the threshold, in the order given."""
    return [place for place in places if place.vacancy > t_up]


def candidates(layers: Sequence[Places], needs: Collection[ResourceDemand], place: PlaceCapacity) -> list[int]:
    """The layers that a place has not, by continuity: of the longest run first, ties by index; max_replicas of them."""
    most = min(map(place.replicas, needs), default=0)
    runs: list[list[int]] = []
    for layer, here in enumerate(layers):
        if place.name in here:
            continue
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    runs.sort(key=lambda run: -len(run))  # stable: ties stay by index
    return [layer for run in runs for layer in run][:most]
