"""The speed-up model of equation 4, for alike devices: to see that the planners' model agrees with it. (CoCoServe)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.planning.cost_model import CostModel
from elastic.planning.placement import Places


@dataclass(frozen=True)
class HomogeneousSpeedup(CostModel):
    """Equation 4, for alike devices and rows split evenly, as a share of the cost without replicas.

    `per_transition` is C/(d·B), so that gamma = delta · `per_transition`, at most 1, follows P. With a fixed
    `gamma`, as in the paper, only the degrees count, and every replica pays.
    """

    layers: int
    per_transition: float = 0.0
    gamma: float | None = None

    def work(self, places: Places) -> float:
        """Return 1/p_i."""
        return 1 / len(places)

    def total(self, work: float, traffic: float, crossings: float) -> float:
        """Return 1/S."""
        gamma = min(1.0, crossings * self.per_transition) if self.gamma is None else self.gamma
        return 1 / alike(gamma, work, self.layers)


def gamma(transitions: int, compute: float, width: int, bandwidth: float) -> float:
    """Return gamma = delta·C / (d·B). (Equation 4)"""
    return transitions * compute / (width * bandwidth)


def alike(gamma: float, inverse_degrees: float | Sequence[int], layers: int) -> float:
    """Return S = 1 / (gamma + (1-gamma)/n · Σ 1/p_i), from the degrees or from their Σ 1/p_i. (Equation 4)"""
    total = inverse_degrees if isinstance(inverse_degrees, int | float) else sum(1 / p for p in inverse_degrees)
    return 1 / (gamma + (1 - gamma) / layers * total)
