"""Instances that would drop layers could share all of them instead, in a fleet that has the policy of lengths, too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic.cluster.fleet.groups.results import Resharded
from elastic.cluster.fleet.groups.verbs import GroupVerbs
from elastic.cluster.fleet.overload.offers import planned_offer
from elastic.controller.policies.overload import OverloadPlan
from elastic.controller.remedies import Offer
from elastic.errors import CapacityError, ConfigError

SETTLE_S = 1.0
"""How long ranks may take to say what they have since they share layers."""


@dataclass(frozen=True)
class SharePlan:
    """Ranks that are to share their layers, and what that would cost."""

    ranks: tuple[str, ...]
    offer: Offer


class Shares:
    """Prices that, and has it done. Ranks part again by the policy of lengths, when no request needs their degree."""

    def __init__(self, verbs: GroupVerbs, most_ranks: int, form: Mapping[str, Any]) -> None:
        """At most so many ranks share layers; 1: none do. `form`: how they change their rank; see `Fleet.reshard`."""
        self._verbs, self._most_ranks, self._form = verbs, most_ranks, form
        self.settled_s = -math.inf
        """Until then ranks may not have said yet what they have since they share layers."""

    def plan(self, plan: OverloadPlan) -> SharePlan | None:
        """Plan it for those that would drop.

        None: these are no number that can share, do not serve alone, or cannot drop weights.
        """
        ranks = tuple(name for group in plan.drops for name in group.members)
        grouped = {name for group in self._verbs.groups() for name in group.members}
        if not 2 <= len(ranks) <= self._most_ranks or len(ranks) & (len(ranks) - 1) or grouped.intersection(ranks):
            return None
        try:
            planned = self._verbs.reshard(ranks, tp=len(ranks), dry_run=True, **self._form)
        except (ConfigError, CapacityError):  # of other hosts, or not cut so
            return None
        offer = planned_offer("reshard", planned)
        return None if offer is None else SharePlan(ranks, offer)

    def do(self, plan: SharePlan, now_s: float, timeout_s: float, why: str) -> Resharded:
        """Have ranks share their layers. Raises what the fleet's verbs raise."""
        self.settled_s = now_s + SETTLE_S
        return self._verbs.reshard(plan.ranks, tp=len(plan.ranks), timeout_s=timeout_s, why=why, **self._form)
