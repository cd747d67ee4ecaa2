"""What a drop, a restore or a reshard costs, in the arbiter's seconds of serving."""

from __future__ import annotations

from dataclasses import dataclass

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


def priced(
    relieved_bytes: int, wire_bytes: int, copying_s: float, flips: int, pause_s: float, slower: float
) -> GroupPrice:
    """Price a change: copying beside the steps, a pause for each flip, and longer or shorter steps for a while.

    `copying_s` and `pause_s` are what such copies and a pause took so far; a second of them is worth what it is in all
    other actions.
    """
    seconds = DISTURBANCE * copying_s + flips * pause_s + HORIZON_S * slower
    return GroupPrice(seconds, relieved_bytes, wire_bytes, flips, slower)
