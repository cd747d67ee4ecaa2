"""How a decision of many actions is handed out: in whole plans, within a budget of bytes; and what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastic.controller.snapshot import Snapshot
from elastic.planning.placement import ResourceDemand
from elastic.types import Action, Evict, Migrate, MigrateKV, Release, Replicate, ResizeKV

MOST_ACTIONS = 8
"""Of one plan; a snapshot has the last 16 events."""
MOST_DOUBLINGS = 5
"""Of a time that doubles with each failure."""


@dataclass(frozen=True)
class Rollout:
    """What was asked for, what is to follow it, and what is not asked for again soon."""

    asked: tuple[Action, ...] = ()
    """What is not known to be done yet,"""
    event: int = -1
    """and the last event before it."""
    todo: tuple[Action, ...] = ()
    """What is to follow it."""
    failures: int = 0
    """Plans in a row that came to nothing."""
    refused: tuple[tuple[type, str, float], ...] = ()
    """(kind, place, until): what came to nothing is not asked for again before then."""

    def settled(self, snapshot: Snapshot, wait_s: float) -> Rollout:
        """With what has become of the last plan, once that is known. `wait_s` doubles with each failure.

        Of a plan of several actions that failed it is not known which could not be done: none is refused for that, but
        the next plans have one action each.
        """
        if snapshot.busy or not self.asked:
            return self
        done = [event.action for event in snapshot.events if event.id > self.event and event.ok]
        if all(action in done for action in self.asked):
            return replace(self, asked=(), failures=0)
        failures = min(MOST_DOUBLINGS, self.failures + 1)
        refused = tuple(one for one in self.refused if one[2] > snapshot.at_s)
        if len(self.asked) == 1:
            (action,) = self.asked
            refused += ((type(action), getattr(action, "place", ""), snapshot.at_s + wait_s * (1 << failures)),)
        return replace(self, asked=(), failures=failures, refused=refused, todo=())

    def refuses(self, kind: type, place: str, now: float) -> bool:
        """Whether an action of this kind at this place came to nothing not long ago."""
        return any(kind is k and place == p and now < until for k, p, until in self.refused)

    def refuses_action(self, action: Action, now: float) -> bool:
        return self.refuses(type(action), getattr(action, "place", ""), now)

    def handing(
        self, actions: Sequence[Action], snapshot: Snapshot, needs: Sequence[ResourceDemand], most: int
    ) -> Rollout:
        """With the first of these actions as `asked`, `most` bytes of them, and the others as `todo`."""
        now, later = first_of(actions, needs, most, 1 if self.failures else MOST_ACTIONS)
        event = snapshot.events[-1].id if snapshot.events else -1
        return replace(self, asked=now, event=event, todo=later)


def first_of(
    actions: Sequence[Action], needs: Sequence[ResourceDemand], most: int, most_actions: int = MOST_ACTIONS
) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
    """Those that can be done as one, and the rest: `most` bytes of weights, but one layer at least.

    All actions of a plan are prepared before any takes effect: none goes into room that an earlier one gives, and no
    layer is moved twice.
    """
    now: list[Action] = []
    later = list(actions)
    while later and len(now) < most_actions and _goes_with(later[0], now):
        action = later.pop(0)
        count = _count(action, needs, most) if isinstance(action, Migrate | Replicate) else None
        if count == 0 and now:
            return tuple(now), (action, *later)
        first, rest = _split(action, count)
        now.append(first)
        if rest is not None:
            kv, others = _with_its_cache(first, later) if most_actions > 1 else ((), later)
            return (*now, *kv), (rest, *others)
        most -= _nbytes(first, needs)
    return tuple(now), tuple(later)


def _goes_with(action: Action, before: Sequence[Action]) -> bool:
    """Whether it can be prepared together with what comes before it."""
    if isinstance(action, ResizeKV):
        return True
    moved = {i for one in before if isinstance(one, MigrateKV) == isinstance(action, MigrateKV) for i in _layers(one)}
    needs_room = isinstance(action, Migrate | Replicate) and any(isinstance(one, Evict | Release) for one in before)
    return not needs_room and moved.isdisjoint(action.layers)


def _layers(action: Action) -> tuple[int, ...]:
    return () if isinstance(action, ResizeKV) else action.layers


def _nbytes(action: Action, needs: Sequence[ResourceDemand]) -> int:
    return sum(needs[i].nbytes for i in action.layers) if isinstance(action, Migrate | Replicate) else 0


def _count(action: Migrate | Replicate, needs: Sequence[ResourceDemand], most: int) -> int:
    """So many of its layers may be copied now."""
    return max(0, min(len(action.layers), most // max(1, max(needs[layer].nbytes for layer in action.layers))))


def _split(action: Action, count: int | None) -> tuple[Action, Action | None]:
    if count is None or isinstance(action, ResizeKV) or max(1, count) >= len(action.layers):
        return action, None
    most = max(1, count)
    return replace(action, layers=action.layers[:most]), replace(action, layers=action.layers[most:])


def _with_its_cache(first: Action, later: Sequence[Action]) -> tuple[tuple[Action, ...], list[Action]]:
    """The KV cache of layers that migrate goes in the same plan, also where only a part of them does now."""
    follows = later[0] if later else None
    if not isinstance(first, Migrate) or not isinstance(follows, MigrateKV) or first.place != follows.place:
        return (), list(later)
    now = tuple(i for i in follows.layers if i in first.layers)
    rest = tuple(i for i in follows.layers if i not in first.layers)
    kv = (replace(follows, layers=now),) if now else ()
    return kv, [*([replace(follows, layers=rest)] if rest else []), *later[1:]]
