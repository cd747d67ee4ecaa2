"""What a fleet could do against an overload, and what it would cost, in the arbiter's seconds of serving."""

from __future__ import annotations

from typing import Literal

from elastic.cluster.control.status import EventKind
from elastic.cluster.fleet.groups.results import Dropped, Resharded
from elastic.controller.fleet_snapshot import FleetSnapshot
from elastic.controller.policies.action_costs import ActionCost
from elastic.controller.policies.arbiter import DISTURBANCE
from elastic.controller.remedies import Offer

MOVED: tuple[EventKind, ...] = ("moved",)
"""The events that tell what moves cost."""
START_S = 10.0
"""How long an instance takes to come, before one did: so long requests wait."""
FORM = ("exchange", "coordinated", "layers_per_step")
"""What of an `Overload` says how layers change their rank."""


def lacking_bytes(snapshot: FleetSnapshot) -> int:
    """Return the KV that lacks: at each instance or group by itself, and of the fleet's queue beyond all that is free.

    It is what remedies are asked for: at least 1.
    """
    lacking = sum(group.short_bytes for group in snapshot.groups)
    queued = snapshot.queued_bytes - sum(group.free_bytes for group in snapshot.groups)
    return max(1, lacking + max(0, queued))


def planned_offer(kind: Literal["drop", "reshard"], planned: Dropped | Resharded) -> Offer | None:
    """Return the offer of a drop, or of ranks to share layers, by its dry run; None where it would be deferred."""
    if planned.price is None:
        return None
    return Offer(kind, planned.price.seconds, planned.freed_bytes)


def move_offer(snapshot: FleetSnapshot, kv_high: float, cost: ActionCost) -> Offer:
    """Return the offer to move requests from instances that are short to those that have room, up to a use of it.

    Only between instances that compute all of their layers themselves. What has to be copied is what lacks.
    """
    alone = [group for group in snapshot.groups if len(group.members) == 1]
    lacking = sum(group.short_bytes for group in alone)
    left = (int(kv_high * group.capacity_bytes) - group.committed_bytes - group.waiting_bytes for group in alone)
    spare = sum(max(0, nbytes) for nbytes in left) if lacking else 0
    copied = min(lacking, spare)
    return Offer("move", DISTURBANCE * cost.byte_s * copied + cost.pause_s, spare)


def add_offer(snapshot: FleetSnapshot, start_s: float, count: int = 1) -> Offer:
    """Return the offer to start more instances: requests wait until they are there."""
    members = [member for group in snapshot.groups for member in group.members]
    return Offer("add", start_s, count * (sum(member.base_bytes for member in members) // max(1, len(members))))
