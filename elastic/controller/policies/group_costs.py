"""What a drop, a restore or a reshard costs, in the arbiter's seconds of serving."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.controller.policies.action_costs import ActionCost
from elastic.controller.policies.arbiter import CostWeights
from elastic.planning.arrangement.flips import FlipOrder, LayerChange
from elastic.planning.arrangement.transfers import Transfer


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


def price(
    changes: Sequence[LayerChange],
    transfers: Sequence[Transfer],
    order: FlipOrder,
    before_s: float,
    after_s: float,
    cost: ActionCost,
    weights: CostWeights,
) -> GroupPrice:
    """Price a change: copying beside the steps, a pause for each flip, and longer or shorter steps for a while.

    `before_s` and `after_s` are of a step of the running requests (`planning.pipeline.step_time`); `cost` is what a
    byte and a pause of this kind took so far. `CostWeights` says what they are worth, as for all other actions.
    """
    loads = sum(nbytes for change in changes for nbytes in change.loads.values())
    unloads = sum(nbytes for change in changes for nbytes in change.unloads.values())
    wire_bytes = loads + sum(transfer.nbytes for transfer in transfers)
    slower = after_s / before_s - 1 if before_s > 0 else 0.0
    return priced(unloads - loads, wire_bytes, len(order.flips), slower, cost, weights)


def priced(
    relieved_bytes: int, wire_bytes: int, flips: int, slower: float, cost: ActionCost, weights: CostWeights
) -> GroupPrice:
    """Price a change of which these sums are known; see `GroupPrice`."""
    copying_s = weights.disturbance * cost.byte_s * wire_bytes + flips * cost.pause_s
    return GroupPrice(copying_s + weights.horizon_s * slower, relieved_bytes, wire_bytes, flips, slower)
