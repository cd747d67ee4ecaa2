"""The cost of placements and the planner of replicas as printed: what those that plan are measured by. (CoCoServe, 4.1)

W and T are no seconds, they only grow with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elastic.planning.cost_model import CostModel
from elastic.planning.incremental_cost import IncrementalCost
from elastic.planning.placement import PlaceCapacity, Placement, Places, ResourceDemand
from elastic.planning.scale_up import add_replicas


@dataclass(frozen=True)
class HeterogeneousCost(CostModel):
    """Equations 1 to 3, for unlike devices; delta is recomputed from P.

    `width` is d, the model dimension; `rows` and `tokens` are the batch and l, the length of its sequences. The rows
    bs_ij of a replica are by the speed of its place, or with `even` as many for each; parts of rows are allowed.
    """

    width: int
    rows: int
    tokens: int
    places: Mapping[str, PlaceCapacity]
    even: bool = False
    bandwidths: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """B, from a place to another: units of data a second. Where none is named nothing has to be copied."""

    def shares(self, places: Places) -> list[float]:
        """Return the share of the batch of each of a layer's places."""
        speeds = [1.0 if self.even else self.places[place].compute for place in places]
        together = sum(speeds)
        return [speed / together for speed in speeds]

    def work(self, places: Places) -> float:
        """Return max_j d² · bs_ij · l / C_ij. (Equation 1)"""
        pairs = zip(places, self.shares(places), strict=True)
        slowest = max([share / self.places[place].compute for place, share in pairs])
        return self.width**2 * self.rows * self.tokens * slowest

    def traffic(self, places: Places) -> float:
        """Return Σ_j d · bs_ij · l / B_ij, over the replicas. (Equation 2)"""
        bandwidths = self.bandwidths.get(places[0], {})
        pairs = zip(places[1:], self.shares(places)[1:], strict=True)
        slow = math.fsum([share / bandwidths.get(place, math.inf) for place, share in pairs])
        return self.width * self.rows * self.tokens * slow

    def total(self, work: float, traffic: float, crossings: float) -> float:
        """Return W + delta · T."""
        return work + crossings * traffic


def scale_up(
    placement: Placement,
    needs: Sequence[ResourceDemand],
    places: Sequence[PlaceCapacity],
    model: CostModel,
    t_up: float = 0.2,
) -> Placement:
    """Add replicas at every place whose vacancy is above `t_up`: each that raises S, candidates by continuity.

    `needs` are of all layers. No place is filled beyond its margin.
    """
    vacant = [place for place in places if place.vacancy > t_up]
    return add_replicas(IncrementalCost(model, placement), needs, vacant).placement
