"""What actions cost, as earlier ones did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastic.types import Event, Evict, Migrate, MigrateKV, Release, Replicate, ResizeKV, Restore, Swap

ALPHA = 0.25
"""Weight of the newest action in the moving averages."""


@dataclass(frozen=True)
class ActionCost:
    """Of one kind of action."""

    byte_s: float
    """Seconds for each byte copied, beside the forward passes."""
    pause_s: float
    """Seconds in which no forward pass can run."""


_COPYING = ActionCost(1 / 5e9, 1e-3)
PRIORS: Mapping[type, ActionCost] = {
    **dict.fromkeys((Swap, Restore, Migrate, MigrateKV, Replicate), _COPYING),
    **dict.fromkeys((Evict, Release), ActionCost(1 / 5e9, 1e-3)),
    ResizeKV: ActionCost(0.0, 1e-4),
}
"""Before the first action of a kind: 5 GB/s and a millisecond."""


@dataclass(frozen=True)
class ActionCosts:
    """Moving averages by kind."""

    known: Mapping[type, ActionCost] = field(default_factory=lambda: PRIORS, hash=False)
    event: int = -1
    """The last one learned from."""

    def of(self, kind: type) -> ActionCost:
        return self.known.get(kind, _COPYING)

    def learned(self, events: Sequence[Event]) -> ActionCosts:
        """With what the events that are new, and went well, did cost."""
        new = [event for event in events if event.id > self.event]
        if not new:
            return self
        known = dict(self.known)
        for event in new:
            kind = type(event.action)
            if event.ok and kind in PRIORS:
                known[kind] = _towards(known[kind], event)
        return replace(self, known=known, event=new[-1].id)


def _towards(price: ActionCost, event: Event) -> ActionCost:
    seen = ActionCost(
        event.prepare_ms / 1e3 / event.moved_bytes if event.moved_bytes else price.byte_s, event.pause_ms / 1e3
    )
    return ActionCost(
        price.byte_s + ALPHA * (seen.byte_s - price.byte_s), price.pause_s + ALPHA * (seen.pause_s - price.pause_s)
    )
