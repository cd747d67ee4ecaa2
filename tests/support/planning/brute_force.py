"""Every placement of replicas there is: what planners are measured against. For a few layers and places only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, product

from elastic.planning.cost_model import CostModel, cost
from elastic.planning.placement import PlaceCapacity, Placement, ResourceDemand


def placements(
    placement: Placement, needs: Sequence[ResourceDemand], places: Sequence[PlaceCapacity]
) -> Iterator[Placement]:
    """The same layers with all sets of replicas that the places have room for, in addition to those there are."""
    new = [[p.name for p in places if p.name not in here] for here in placement.layers]
    choices = [[c for n in range(len(names) + 1) for c in combinations(names, n)] for names in new]
    for chosen in product(*choices):
        taken = Counter((name, layer) for layer, names in enumerate(chosen) for name in names)
        if all(has_room(place, [needs[i] for name, i in taken if name == place.name]) for place in places):
            yield Placement(tuple((*here, *more) for here, more in zip(placement.layers, chosen, strict=True)))


def has_room(place: PlaceCapacity, needs: Sequence[ResourceDemand]) -> bool:
    """Whether all of these fit below the margin of a place."""
    compute = sum(need.compute for need in needs)
    return sum(need.total_bytes for need in needs) <= place.room_bytes and compute <= place.room_compute + 1e-9


def best(
    placement: Placement, needs: Sequence[ResourceDemand], places: Sequence[PlaceCapacity], model: CostModel
) -> Placement:
    """The cheapest of all."""
    return min(placements(placement, needs, places), key=lambda p: cost(model, p))
