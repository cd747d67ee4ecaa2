"""Seconds in which every running request gets one token, of instances that compute layers of each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple


class StepSeconds(NamedTuple):
    """What the next step of an instance takes."""

    layer_s: float = 0.0
    """In one decoder layer."""
    rest_s: float = 0.0
    """Before and behind them."""


def shared_round_s(
    steps: Mapping[str, StepSeconds],
    layers_at: Mapping[str, Mapping[str, float]],
    hops: Mapping[str, int],
    hop_s: float,
    depth: Mapping[str, float],
) -> float:
    """Return the seconds of a round of instances that compute layers of each other: each has one step in flight.

    `steps`: of the instances that have work. `layers_at`: rank -> instance -> how many of its layers it computes; what
    is not decoder layers each computes at its own rank. The round is over neither before the busiest rank has computed
    all that it has of it, nor before the slowest instance's step has passed all of its layers and `hops` between ranks.
    Of a layer that ranks share each has a part; `depth` is how many layers the largest parts of an instance make up,
    one after another.
    """
    of = defaultdict(StepSeconds, steps)
    busiest = max(
        (
            sum(of[home].layer_s * count for home, count in at.items()) + of[rank].rest_s
            for rank, at in layers_at.items()
        ),
        default=0.0,
    )
    passed = (depth[home] * of[home].layer_s + of[home].rest_s + hop_s * hops[home] for home in hops if home in steps)
    return max(busiest, max(passed, default=0.0))
