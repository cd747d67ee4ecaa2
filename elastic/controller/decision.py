"""What a policy answers, and what a policy is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from elastic.controller.snapshot import EvictionRequest, Snapshot
from elastic.types import Action


@dataclass(frozen=True)
class Plan:
    """What is to be done now."""

    actions: tuple[Action, ...]
    """All or none are done; (): nothing is to be done."""
    reason: str
    """Why, also why nothing: in words that stay the same while the reason does. It is logged when it changes."""
    state: Any = None
    """What `decide` is given at the next tick."""
    figures: str = ""
    """The numbers behind the reason; logged with it."""
    short: bool = False
    """Whether a shortage is seen: others of the group take no room then."""
    asks: tuple[EvictionRequest, ...] = ()
    """What other models of the group are to do first; there are no actions then."""


class ControllerPolicy(Protocol):
    """A policy: ours, or any object with this method."""

    def decide(self, snapshot: Snapshot, state: Any) -> Plan:
        """A pure function of what it is given: `state` is that of the last plan, None at first."""
        ...
