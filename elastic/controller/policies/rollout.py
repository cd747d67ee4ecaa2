"""A decision of many actions, issued in whole plans within a budget of bytes; and the outcome of each plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastic.controller.snapshot import Snapshot
from elastic.planning.placement import ResourceDemand
from elastic.types import Action, Evict, Migrate, MigrateKV, Release, Replicate, ResizeKV

MOST_ACTIONS = 8
"""The most actions of one plan; a snapshot has the last 16 events."""
MOST_DOUBLINGS = 5
"""The most doublings of a time that doubles with each failure."""


@dataclass(frozen=True)
class Rollout:
    """The actions asked for, those that are to follow, and those that failed just now."""

    issued: tuple[Action, ...] = ()
    """The actions of the last plan, until their outcome is known,"""
    event: int = -1
    """and the last event before it."""
    remaining: tuple[Action, ...] = ()
    """The actions that follow the last plan."""
    failures: int = 0
    """Plans in a row that came to nothing."""
    refused: tuple[tuple[type, str, float], ...] = ()
    """(kind, place, until): an action that came to nothing is not asked for again before then."""

    def with_outcome(self, snapshot: Snapshot, wait_s: float) -> Rollout:
        """Add the outcome of the last plan, once it is known. `wait_s` doubles with each failure.

        Of a plan of several actions that failed it is not known which could not be done: none is refused for that, but
        the next plans have one action each.
        """
        if snapshot.busy or not self.issued:
            return self
        done = self.done(snapshot)
        if all(action in done for action in self.issued):
            return replace(self, issued=(), failures=0)
        failures = min(MOST_DOUBLINGS, self.failures + 1)
        refused = tuple(refusal for refusal in self.refused if refusal[2] > snapshot.at_s)
        if len(self.issued) == 1:
            (action,) = self.issued
            refused += ((type(action), getattr(action, "place", ""), snapshot.at_s + wait_s * 2**failures),)
        return replace(self, issued=(), failures=failures, refused=refused, remaining=())

    def done(self, snapshot: Snapshot) -> list[Action]:
        """Return what was done since the last plan, which is of it or not; nothing once its outcome is known."""
        return [event.action for event in snapshot.events if self.issued and event.id > self.event and event.ok]

    def refuses(self, action: Action, now: float) -> bool:
        """Tell whether an action of this kind at this place came to nothing not long ago."""
        place = getattr(action, "place", "")
        return any(kind is type(action) and where == place and now < until for kind, where, until in self.refused)

    def issue(
        self, actions: Sequence[Action], snapshot: Snapshot, needs: Sequence[ResourceDemand], most_bytes: int
    ) -> Rollout:
        """Issue the first of these actions, as one plan of at most so many bytes; the others remain."""
        first, rest = first_of(actions, needs, most_bytes, 1 if self.failures else MOST_ACTIONS)
        event = snapshot.events[-1].id if snapshot.events else -1
        return replace(self, issued=first, event=event, remaining=rest)


def first_of(
    actions: Sequence[Action], needs: Sequence[ResourceDemand], most_bytes: int, most_actions: int = MOST_ACTIONS
) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
    """Divide actions into those of the next plan and the rest: so many bytes of weights, but one layer at least.

    All actions of a plan are prepared before any takes effect: none goes into room that an earlier one gives, and no
    layer is moved twice. The KV cache of layers that migrate goes in the same plan, also where only some of them do.
    """
    plan: list[Action] = []
    rest = list(actions)
    while rest and len(plan) < most_actions and _goes_with(rest[0], plan):
        action = rest[0]
        if not isinstance(action, Migrate | Replicate):
            plan.append(rest.pop(0))
            continue
        sizes = [needs[layer].nbytes for layer in action.layers]
        count = min(len(sizes), most_bytes // max(1, max(sizes)))
        if count <= 0 and plan:
            break
        count = max(1, count)
        plan.append(replace(action, layers=action.layers[:count]))
        if count < len(sizes):
            rest[0] = replace(action, layers=action.layers[count:])
            if most_actions > 1:
                _bring_cache(plan, rest)
            break
        del rest[0]
        most_bytes -= sum(sizes)
    return tuple(plan), tuple(rest)


def _bring_cache(plan: list[Action], rest: list[Action]) -> None:
    """Move the KV cache of the layers that migrate at the end of a plan into it, from the action after the rest."""
    migrate, cache = plan[-1], rest[1] if len(rest) > 1 else None
    if isinstance(migrate, Migrate) and isinstance(cache, MigrateKV) and cache.place == migrate.place:
        now = replace(cache, layers=tuple(i for i in cache.layers if i in migrate.layers))
        later = replace(cache, layers=tuple(i for i in cache.layers if i not in migrate.layers))
        if now.layers and _goes_with(now, plan):
            plan.append(now)
            rest[1:2] = [later] if later.layers else []


def _goes_with(action: Action, plan: Sequence[Action]) -> bool:
    """Tell whether an action can be prepared together with those before it in a plan."""
    if isinstance(action, ResizeKV):
        return True
    if isinstance(action, Migrate | Replicate) and any(isinstance(before, Evict | Release) for before in plan):
        return False
    moves_kv = isinstance(action, MigrateKV)
    same = [a for a in plan if not isinstance(a, ResizeKV) and isinstance(a, MigrateKV) == moves_kv]
    return all(set(before.layers).isdisjoint(action.layers) for before in same)
