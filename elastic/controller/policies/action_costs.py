"""The costs of actions, learned from earlier ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastic.controller.sensors.sliding_window import moving_average
from elastic.types import KINDS, Event, ResizeKV

WEIGHT = 0.25
"""Weight of the newest action in the moving averages."""


@dataclass(frozen=True)
class ActionCost:
    """The cost of one kind of action."""

    byte_s: float
    """Seconds for each byte copied, beside the forward passes."""
    pause_s: float
    """Seconds in which no forward pass can run."""


_COPYING = ActionCost(1 / 5e9, 1e-3)
PRIORS: Mapping[type, ActionCost] = {**dict.fromkeys(KINDS, _COPYING), ResizeKV: ActionCost(0.0, 1e-4)}
"""Before the first action of a kind: 5 GB/s and a millisecond."""


@dataclass(frozen=True)
class ActionCosts:
    """Moving averages by kind of action, such as `Swap`."""

    by_kind: Mapping[type, ActionCost] = field(default_factory=lambda: PRIORS, hash=False)
    event: int = -1
    """The last one learned from."""

    def learned(self, events: Sequence[Event]) -> ActionCosts:
        """Add the costs of the events that are new, and went well."""
        new = [event for event in events if event.id > self.event]
        if not new:
            return self
        by_kind = dict(self.by_kind)
        for event in new:
            kind = type(event.action)
            if event.ok and kind in PRIORS:
                cost = by_kind[kind]
                byte_s = event.prepare_ms / 1e3 / event.moved_bytes if event.moved_bytes else cost.byte_s
                by_kind[kind] = ActionCost(
                    moving_average(cost.byte_s, byte_s, WEIGHT),
                    moving_average(cost.pause_s, event.pause_ms / 1e3, WEIGHT),
                )
        return replace(self, by_kind=by_kind, event=new[-1].id)
