"""What a drop, a restore or a reshard costs, in the arbiter's seconds of serving."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.controller.policies.action_costs import ActionCost
from elastic.controller.policies.arbiter import DISTURBANCE, HORIZON_S


@dataclass(frozen=True)
class GroupPrice:
    """The price of a change of an arrangement. All of them are lossless."""

    seconds: float
    """Of serving that it costs; below zero: it is faster afterwards."""
    relieved_bytes: int
    """Weights that leave their ranks, less those that come; below zero: a restore."""
    wire_bytes: int
    """Keys, values and weights that go from rank to rank."""
    flips: int
    slower: float
    """The share by which steps are longer afterwards."""


def priced(relieved_bytes: int, wire_bytes: int, flips: int, slower: float, cost: ActionCost) -> GroupPrice:
    """Price a change: copying beside the steps, a pause for each flip, and longer or shorter steps for a while.

    `cost` is what a byte and a pause of this kind took so far; they are worth what they are for all other actions.
    """
    copying_s = DISTURBANCE * cost.byte_s * wire_bytes + flips * cost.pause_s
    return GroupPrice(copying_s + HORIZON_S * slower, relieved_bytes, wire_bytes, flips, slower)
