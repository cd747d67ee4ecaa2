"""The answer of a policy and the policy as a protocol; what a controller makes of wrong answers, and of errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from elastic.controller.snapshot import EvictionRequest, Snapshot
from elastic.errors import ConfigError
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
    fault: str = ""
    """What went wrong in one of several policies; the controller keeps and logs it as a fault of its own."""


class ControllerPolicy(Protocol):
    """A policy: one of Elastic's, or any object with this method."""

    def decide(self, snapshot: Snapshot, state: Any) -> Plan:
        """Return the plan: a pure function of what is given. `state` is that of the last plan, None at first."""


def checked(plan: object) -> Plan:
    """Return a plan as it is; raise `ConfigError` for anything else."""
    if not isinstance(plan, Plan) or not (
        all(isinstance(several, tuple) for several in (plan.actions, plan.asks))
        and all(isinstance(text, str) for text in (plan.reason, plan.figures, plan.fault))
    ):
        raise ConfigError(f"the policy returned {str(plan)[:200]!r}; it must be a Plan, with a tuple and a text")
    for action in plan.actions:
        if not isinstance(action, Action):
            raise ConfigError(f"the policy asked for {str(action)[:200]!r}, which is no action")
    return plan


def error_text(error: BaseException) -> str:
    """Return what an error says, if it can."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # of the `__str__` of whoever wrote the policy
        return f"{type(error).__name__}, whose text cannot be had"
