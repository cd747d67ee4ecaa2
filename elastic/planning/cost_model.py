"""The cost of a placement and its speed-up, in the form of the paper: equations 1 to 3. (CoCoServe, section 4.1)

`elastic.planning.measured_cost` has the model in seconds; `tests/support/planning/printed.py` has it as printed.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Protocol

from elastic.planning.placement import Placement, Places


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
        """Return the cost of a placement, from the sums over its layers and transitions: in one unit, their sum."""
        return work + traffic + crossings


def cost(model: CostModel, placement: Placement) -> float:
    """Return W(P) + T(P), or what another model has for it."""
    layers = placement.layers
    crossings = math.fsum(model.crossing(before, after) for before, after in pairwise(placement.chain))
    return model.total(math.fsum(map(model.work, layers)), math.fsum(map(model.traffic, layers)), crossings)


def speedup(model: CostModel, placement: Placement) -> float:
    """Return S(P), against the same layers without replicas. (Equation 3)"""
    return cost(model, placement.alone_at_home) / cost(model, placement)
