"""The cost of a placement and its speed-up: the model of the paper as printed. (CoCoServe, section 4.1)

W and T are no seconds, they only grow with them; `elastic.planning.measured_cost` has the same model in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from elastic.planning.placement import PlaceCapacity, Placement, Places


class CostModel(Protocol):
    """Costs that add up over layers, and over the transitions between them. All pure."""

    def work(self, places: Places) -> float:
        """Return the cost of computing one layer at these places."""

    def traffic(self, places: Places) -> float:
        """Return the cost of bringing a layer's rows to the places of its replicas; nothing, where none says more."""
        return 0.0

    def crossing(self, before: Places, after: Places) -> float:
        """Return the cost between two layers: where no model says more, 1 for each transition, so they add up to delta.

        Nothing where both have the same places.
        """
        return float(before != after)

    def total(self, work: float, traffic: float, crossings: float) -> float:
        """Return the cost of a placement, from the sums over its layers and transitions."""


def cost(model: CostModel, placement: Placement) -> float:
    """Return W(P) + T(P), or what another model has for it."""
    layers = placement.layers
    crossings = math.fsum(model.crossing(before, after) for before, after in pairwise(placement.chain))
    return model.total(math.fsum(map(model.work, layers)), math.fsum(map(model.traffic, layers)), crossings)


def speedup(model: CostModel, placement: Placement) -> float:
    """Return S(P), against the same layers without replicas. (Equation 3)"""
    return cost(model, placement.alone_at_home) / cost(model, placement)


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
        bandwidths = self.places[places[0]].bandwidths
        pairs = zip(places[1:], self.shares(places)[1:], strict=True)
        slow = math.fsum([share / bandwidths.get(place, math.inf) for place, share in pairs])
        return self.width * self.rows * self.tokens * slow

    def total(self, work: float, traffic: float, crossings: float) -> float:
        """Return W + delta · T."""
        return work + crossings * traffic
