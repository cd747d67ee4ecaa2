"""Instances that run out of KV merge and drop layers that they hold twice, and part again after it. (KunServe)

Each group of instances is judged by itself: one that is short takes partners as far as it needs them, the others stay
as they are. A queue that no instance has room for is the shortage of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from elastic.config import Overload
from elastic.controller.backoff import MOST_FAILURES, regretted
from elastic.controller.fleet_snapshot import FleetSnapshot, GroupReading
from elastic.planning.arrangement.drop import DropPlan, GroupPlan, drop_plan

Layers = tuple[frozenset[int], ...]


@dataclass(frozen=True)
class GroupState:
    """What is remembered of one group of instances."""

    names: tuple[str, ...]
    pressed: int = 0
    """Ticks of overload in a row; 0 after a drop."""
    eased: int = 0
    """Ticks in a row in which all layers could have returned."""
    pressed_s: float = -math.inf
    """The last time of overload."""
    acted_s: float = -math.inf
    idle_since_s: float | None = None
    asked: Layers | None = None
    """What its members held before the action whose outcome is not known yet."""
    failures: int = 0
    """Actions in a row that came to nothing."""
    restored_s: float = -math.inf
    """The last restore; -inf again after the drop that follows it."""
    regrets: int = 0
    """Restores in a row after which there was an overload again before long."""


@dataclass(frozen=True)
class OverloadState:
    """The memory of the policy from tick to tick."""

    groups: tuple[GroupState, ...] = ()
    queue_ticks: int = 0
    """Ticks in a row in which the fleet's queue needed more than all instances have free."""


@dataclass(frozen=True)
class OverloadPlan:
    """What is to be done now, and why."""

    drops: tuple[GroupPlan, ...]
    """Groups that change; `GroupPlan.groups` are numbers of the snapshot's groups."""
    restores: tuple[tuple[str, ...], ...]
    """Groups, by their names, that get all layers back and part."""
    reason: str
    """Why, also why nothing: in words that stay the same while the reason does."""
    state: OverloadState
    figures: str = ""
    scale_out: int = 0
    """Instances that would have to be added, since no drop frees enough."""


@dataclass(frozen=True)
class OverloadPolicy:
    """Says which groups drop layers, and which get them back. Pure: all that it remembers is in its state."""

    settings: Overload = field(default_factory=Overload)

    def decide(self, snapshot: FleetSnapshot, state: OverloadState | None = None) -> OverloadPlan:
        """Return the plan for now; its `state` is to be given at the next tick."""
        state = state or OverloadState()
        now = snapshot.at_s
        groups = snapshot.groups
        carried = _carried(state.groups, groups)
        states = [self._observe(snapshot, group, before) for group, before in zip(groups, carried, strict=True)]
        queue_ticks = state.queue_ticks + 1 if self._queue_need(snapshot) > 0 else 0
        drops, reason, short = self._drops(snapshot, states, queue_ticks)
        restores: tuple[int, ...] = ()
        if not reason:
            calm = not queue_ticks and not any(each.pressed for each in states)
            restores, reason = self._restores(snapshot, states) if calm else ((), "overload, but not for long yet")
        acted = {number for drop in drops for number in drop.groups}
        for number, before in enumerate(states):
            if number in acted:
                states[number] = self._dropped(before, groups[number], now)
            elif number in restores:
                states[number] = replace(before, acted_s=now, eased=0, restored_s=now, asked=_layers(groups[number]))
        figures = ", ".join(f"{'+'.join(group.names)} {group.use:.0%}" for group in groups)
        after = OverloadState(tuple(states), 0 if drops else queue_ticks)
        names = tuple(groups[number].names for number in restores)
        return OverloadPlan(drops, names, reason, after, f"KV {figures}", self._missing_instances(snapshot, short))

    # -- what is seen

    def _overload(self, group: GroupReading) -> bool:
        """Tell whether requests wait at a group that find no KV."""
        settings = self.settings
        if group.waiting_bytes <= group.free_bytes:
            return False
        return group.use >= settings.kv_high or (
            group.queue_s >= settings.queue_high_s and group.use >= settings.queue_kv
        )

    def _queue_need(self, snapshot: FleetSnapshot) -> int:
        """Return what the fleet's queue needs beyond what is free; 0 while it is to be waited out."""
        if not snapshot.queued_bytes or not snapshot.groups:
            return 0
        need = snapshot.queued_bytes - sum(group.free_bytes for group in snapshot.groups)
        capacity = sum(group.capacity_bytes for group in snapshot.groups)
        use = sum(group.committed_bytes for group in snapshot.groups) / capacity if capacity else 1.0
        settings = self.settings
        late = snapshot.queue_s >= settings.queue_high_s and use >= settings.queue_kv
        return need if need > 0 and (use >= settings.kv_high or late) else 0

    def _eased(self, snapshot: FleetSnapshot, group: GroupReading) -> bool:
        """Tell whether a group would do without what it has dropped, each instance with its own requests."""
        settings = self.settings
        highest = settings.kv_high - settings.margin
        return (
            not group.waiting_bytes
            and not snapshot.queued_bytes
            and group.committed_bytes <= settings.restore_below * group.base_bytes
            and all(member.home_bytes <= highest * member.base_bytes for member in group.members)
        )

    def _observe(self, snapshot: FleetSnapshot, group: GroupReading, state: GroupState) -> GroupState:
        """Count and time what is seen of a group."""
        now, overload = snapshot.at_s, self._overload(group)
        eases = not overload and _has_dropped(snapshot, group) and self._eased(snapshot, group)
        idle = not group.running and not group.committed_bytes and not group.waiting_bytes
        since = now if state.idle_since_s is None else state.idle_since_s
        pressed, pressed_s = (state.pressed + 1, now) if overload else (0, state.pressed_s)
        eased, idle_since_s = state.eased + 1 if eases else 0, since if idle else None
        if (pressed, pressed_s, eased, idle_since_s) == (
            state.pressed,
            state.pressed_s,
            state.eased,
            state.idle_since_s,
        ):
            return state  # as of most groups at most ticks
        return replace(state, pressed=pressed, pressed_s=pressed_s, eased=eased, idle_since_s=idle_since_s)

    def _may_act(self, group: GroupReading, state: GroupState, now: float) -> bool:
        return not group.busy and now - state.acted_s >= self.settings.cooldown_s * 2**state.failures

    # -- what is done

    def _drops(
        self, snapshot: FleetSnapshot, states: Sequence[GroupState], queue_ticks: int
    ) -> tuple[tuple[GroupPlan, ...], str, int]:
        """Return the groups that drop layers, why, and the bytes that no drop frees. No words: no overload lasts."""
        ticks, groups = self.settings.pressure_ticks, snapshot.groups
        free = {i for i, (g, s) in enumerate(zip(groups, states, strict=True)) if self._may_act(g, s, snapshot.at_s)}
        pressed = [number for number, state in enumerate(states) if state.pressed >= ticks]
        if queue_ticks >= ticks:
            need = self._queue_need(snapshot) + sum(groups[number].short_bytes for number in pressed)
            fullest = sorted(free, key=lambda number: (-groups[number].use, number))
            plan = self._plan(snapshot, fullest, need) if free else None
            if plan:
                return plan.groups, "requests wait at the fleet, and no instance has KV for them", 0
            if len(free) < len(groups):
                return (), "requests wait at the fleet; an action is under way, or was just now", 0
            plan = self._most(snapshot, fullest)
            if plan:
                words = "requests wait at the fleet, and no drop frees enough: as much is dropped as can be"
                return plan.groups, words, need - plan.freed_bytes
            return (), "requests wait at the fleet, and no drop frees enough", need
        drops: list[GroupPlan] = []
        reasons, short = [], 0
        for number in sorted(pressed, key=lambda number: (-groups[number].short_bytes, number)):
            if number not in free:
                continue
            plan, words, lacking = self._relieve(snapshot, number, free, pressed)
            reasons.append(words)
            short += lacking
            if plan is not None:
                drops.extend(plan.groups)
                free -= {other for group in plan.groups for other in group.groups}
        return tuple(drops), "; ".join(dict.fromkeys(reasons)), short

    def _relieve(
        self, snapshot: FleetSnapshot, number: int, free: set[int], pressed: Sequence[int]
    ) -> tuple[DropPlan | None, str, int]:
        """Plan a drop for one group, with as few partners as suffice: calm ones first, the smallest and emptiest.

        Returns it with the reason, and the bytes that the group lacks then.
        """
        groups, own = snapshot.groups, snapshot.groups[number].short_bytes
        need = own
        others = [other for other in free if other != number]
        partners = sorted(others, key=lambda i: (i in pressed, len(groups[i].members), -groups[i].free_bytes, i))
        most: list[int] = []
        for count in range(len(partners) + 1):
            chosen = [number, *partners[:count]]
            need += groups[chosen[-1]].short_bytes if count and chosen[-1] in pressed else 0
            if sum(len(groups[i].members) for i in chosen) > self.settings.most_stages:
                break
            plan = self._plan(snapshot, chosen, need)
            if plan is not None and any(number in group.groups for group in plan.groups):
                return plan, "an instance is overloaded", 0
            most = chosen
        plan = self._most(snapshot, most)
        if plan is not None and any(number in group.groups for group in plan.groups):
            words = "an instance is overloaded, and no drop frees enough: as much is dropped as can be"
            return plan, words, max(1, own - plan.freed_bytes)
        return None, "an instance is overloaded, and no drop frees enough: requests wait for KV", own

    def _plan(
        self, snapshot: FleetSnapshot, numbers: Sequence[int], need: int, margin: float | None = None
    ) -> DropPlan | None:
        """Plan a drop among some of the groups, with the margin if there is one; its numbers are the snapshot's.

        A group that has dropped layers, and is short again, drops all that it still holds several times: it is a
        pipeline already, and requests would wait anew for each further drop.
        """
        share = self.settings.margin if margin is None else margin
        spare = int(share * sum(snapshot.groups[number].capacity_bytes for number in numbers))
        all_twice = sum(_rest(snapshot, snapshot.groups[number]) for number in numbers) if margin is None else 0
        plans = (
            drop_plan(
                [[member.held for member in snapshot.groups[number].members] for number in numbers],
                snapshot.layer_bytes,
                wanted,
                whole=not self.settings.partial,
                most=self.settings.most_stages,
            )
            for wanted in dict.fromkeys((max(need + spare, all_twice), need + spare, need))
        )
        plan = next((plan for plan in plans if plan is not None), None)
        if plan is None or not plan.groups:
            return None
        groups = tuple(replace(group, groups=tuple(numbers[i] for i in group.groups)) for group in plan.groups)
        return replace(plan, groups=groups)

    def _most(self, snapshot: FleetSnapshot, numbers: Sequence[int]) -> DropPlan | None:
        """Plan the drop among some of the groups that frees the most. None: nothing can be, or it is not wanted."""
        model = sum(snapshot.layer_bytes)
        held = [member.held.layers for number in numbers for member in snapshot.groups[number].members]
        twice = sum(snapshot.layer_bytes[layer] for layers in held for layer in layers) - model
        if not self.settings.best_effort or twice <= 0 or model <= 0:
            return None
        best, low, high = None, 1, -(-twice // model)  # each merge frees one model
        while low <= high:
            middle = (low + high) // 2
            plan = self._plan(snapshot, numbers, min(twice, middle * model), margin=0.0)
            best, low, high = (best, low, middle - 1) if plan is None else (plan, middle + 1, high)
        return best

    def _dropped(self, state: GroupState, group: GroupReading, now: float) -> GroupState:
        regrets = regretted(state.regrets, state.restored_s, now, self.settings.dwell_s)
        return replace(
            state, acted_s=now, pressed=0, eased=0, regrets=regrets, restored_s=-math.inf, asked=_layers(group)
        )

    def _restores(self, snapshot: FleetSnapshot, states: Sequence[GroupState]) -> tuple[tuple[int, ...], str]:
        """Return the groups that get their layers back, and why, or why none does."""
        now, settings, reasons, restores = snapshot.at_s, self.settings, [], []
        for number, (group, state) in enumerate(zip(snapshot.groups, states, strict=True)):
            if not _has_dropped(snapshot, group):
                continue
            idle = state.idle_since_s is not None and now - state.idle_since_s >= settings.idle_s
            if not self._may_act(group, state, now):
                reasons.append("an action is under way, or was just now")
            elif state.eased < (1 if idle else settings.recovery_ticks):
                reasons.append("the load still needs the dropped layers' memory")
            elif not idle and now - max(state.pressed_s, state.acted_s) < settings.dwell_s * 2**state.regrets:
                reasons.append("the overload has gone, but not for long yet")
            else:
                restores.append(number)
        if restores:
            return tuple(restores), "the overload has gone"
        return (), "; ".join(dict.fromkeys(reasons)) or "all is well"

    def _missing_instances(self, snapshot: FleetSnapshot, short: int) -> int:
        """Return how many more instances would have room for so many bytes."""
        members = [member for group in snapshot.groups for member in group.members]
        usual = sum(member.base_bytes for member in members) // max(1, len(members))
        return -(-short // usual) if short and usual else int(short > 0)


def _layers(group: GroupReading) -> Layers:
    return tuple(member.held.layers for member in group.members)


def _has_dropped(snapshot: FleetSnapshot, group: GroupReading) -> bool:
    return any(len(member.held.layers) < len(snapshot.layer_bytes) for member in group.members)


def _rest(snapshot: FleetSnapshot, group: GroupReading) -> int:
    """Return the bytes of layers that a group which has dropped some still holds several times."""
    if not _has_dropped(snapshot, group):
        return 0
    held = sum(snapshot.layer_bytes[layer] for layers in _layers(group) for layer in layers)
    return held - sum(snapshot.layer_bytes)


def _carried(states: Sequence[GroupState], groups: Sequence[GroupReading]) -> list[GroupState]:
    """Return what is remembered of each group; no two states are of the same instance."""
    same = {state.names: state for state in states}
    return [_settled(same[group.names], group) if group.names in same else _joined(states, group) for group in groups]


def _settled(state: GroupState, group: GroupReading) -> GroupState:
    """Return what is remembered of a group that is as it was, with the outcome of its last action."""
    if group.busy or state.asked is None:
        return state
    failures = min(state.failures + 1, MOST_FAILURES) if state.asked == _layers(group) else 0
    return replace(state, asked=None, failures=failures)


def _joined(states: Sequence[GroupState], group: GroupReading) -> GroupState:
    """Return what the members of a group that merged or parted bring with them."""
    names = set(group.names)
    old = [state for state in states if names & set(state.names)]
    return GroupState(
        group.names,
        pressed_s=max((state.pressed_s for state in old), default=-math.inf),
        acted_s=max((state.acted_s for state in old), default=-math.inf),
        restored_s=max((state.restored_s for state in old), default=-math.inf),
        regrets=max((state.regrets for state in old), default=0),
    )
