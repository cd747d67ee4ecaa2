"""The answer of a policy, and the policy as a protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from elastic.controller.snapshot import EvictionRequest, Snapshot
from elastic.types import Action


@dataclass(frozen=True)
class Plan:
    """The actions for now, and the reason for them."""

    actions: tuple[Action, ...]
    """All or none are done; (): nothing is to be done."""
    reason: str
    """Why, also why nothing: in words that stay the same while the reason does. It is logged when it changes."""
    state: Any = None
    """The state that `decide` is given at the next tick."""
    figures: str = ""
    """The numbers behind the reason; logged with it."""
    short: bool = False
    """True when a shortage is seen: peers of the group take no room then."""
    asks: tuple[EvictionRequest, ...] = ()
    """Requests to other models of the group, to be met first; there are no actions then."""


class ControllerPolicy(Protocol):
    """A policy: one of Elastic's, or any object with this method."""

    def decide(self, snapshot: Snapshot, state: Any) -> Plan:
        """Return the plan: a pure function of what is given. `state` is that of the last plan, None at first."""
