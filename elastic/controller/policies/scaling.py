"""The policy `scale`: replicas where there is room, less where there is a shortage. (CoCoServe, sections 4 and 5)"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from elastic.config import SLO, Scale
from elastic.controller.decision import Plan
from elastic.controller.policies.rollout import MOST_DOUBLINGS, Rollout
from elastic.controller.policies.sharing import SharedCapacity, asked_of, beside_others, guests, share_out, take_over
from elastic.controller.policies.shortage import PlaceLoad, describe, find_shortage
from elastic.controller.snapshot import EvictionRequest, Snapshot
from elastic.planning.cost_model import CostModel, speedup
from elastic.planning.local_search import plan_up
from elastic.planning.placement import ResourceDemand, difference
from elastic.planning.scale_down import REMEDIES, Deficit, Remedy, scale_down
from elastic.types import Action, Migrate, Release, Replicate, ResizeKV, Restore

ROWS_ALPHA = 0.1
AGAIN = 3
"""Times its patience, after which a model asks again that asked in vain."""


@dataclass(frozen=True)
class ScalingState:
    """What the policy remembers from tick to tick."""

    pressed: int = 0
    """Ticks of shortage in a row."""
    eased: int = 0
    pressed_s: float = -math.inf
    others_s: float = -math.inf
    """When another model of the group was short last."""
    acted_s: float = -math.inf
    grown_s: float = -math.inf
    """When replicas were added last."""
    regrets: int = 0
    """Shortages in a row that came soon after replicas."""
    rows: float = 0.0
    """Moving average of the requests that run."""
    waits: int = 0
    """How often requests had found no KV block."""
    looked_s: float = -math.inf
    """When no replicas were found that gain enough."""
    asking_s: float | None = None
    """Since when others are asked to take replicas away."""
    handout: Rollout = field(default_factory=Rollout)
    reduced: tuple[Action, ...] = ()
    """What undoes the releases and limits that are in force."""


class ScalingPolicy:
    """`needs` are of all decoder layers, as bytes; `model` makes the cost model for so many rows. Pure."""

    def __init__(
        self,
        settings: Scale,
        needs: Sequence[ResourceDemand],
        model: Callable[[int], CostModel],
        slo: SLO | None = None,
    ) -> None:
        self.settings = settings
        self.slo = slo
        self.tick_s = settings.tick_s
        self._needs = tuple(needs)
        self._model = model

    def decide(self, snapshot: Snapshot, state: ScalingState | None = None) -> Plan:
        """What to do now; the plan's `state` is what it wants to be given at the next tick."""
        return self.options(snapshot, state)[0]

    def options(self, snapshot: Snapshot, state: ScalingState | None = None) -> tuple[Plan, ...]:
        """What `decide` says, then whatever else could be done instead: an arbiter may find it cheaper."""
        before = state or ScalingState()
        before = replace(before, handout=before.handout.settled(snapshot, self._wait_s))
        if len(snapshot.places) < 2 or not snapshot.residencies:
            return (Plan((), "there is one place only", before),)
        load = beside_others(describe(snapshot, self._needs, self.settings), snapshot, self.settings)
        shortage, why = find_shortage(snapshot, load, self.settings, self.slo, before.waits)
        state = self._count(snapshot, shortage, before)
        plans = [self._choose(snapshot, load, shortage, why, state)]
        if plans[0].actions and shortage is not None and not before.handout.todo:
            plans += self._instead(snapshot, load, shortage, why, state)
        free = ", ".join(f"{p.name} {p.vacancy:.0%}" for p in load.places)
        short = shortage is not None or bool(before.reduced)
        return tuple(replace(plan, figures=f"free: {free}; {load.rows} rows", short=short) for plan in plans)

    def _count(self, snapshot: Snapshot, shortage: Deficit | None, state: ScalingState) -> ScalingState:
        now, running = snapshot.at_s, snapshot.traffic.running
        if shortage is not None and not state.pressed:
            state = self._regretting(state, now)
        over = shortage is None and state.pressed > 0
        ask_anew_s = AGAIN * self.settings.patience_s + self._wait_s
        again = over or (state.asking_s is not None and now - state.asking_s > ask_anew_s)
        return replace(
            state,
            pressed=state.pressed + 1 if shortage else 0,
            eased=0 if shortage else state.eased + 1,
            pressed_s=now if shortage else state.pressed_s,
            others_s=now if any(other.short for other in snapshot.others) else state.others_s,
            asking_s=None if again else state.asking_s,
            rows=state.rows + ROWS_ALPHA * (running - state.rows),
            waits=snapshot.traffic.stalls + snapshot.traffic.preemptions,
        )

    def _regretting(self, state: ScalingState, now: float) -> ScalingState:
        """Replicas that have to leave soon after they came: the next will be longer in coming."""
        if now - state.grown_s >= 4 * self._dwell_s(state):
            return state
        return replace(state, grown_s=-math.inf, regrets=min(MOST_DOUBLINGS, state.regrets + 1))

    def _choose(
        self, snapshot: Snapshot, load: PlaceLoad, shortage: Deficit | None, why: str, state: ScalingState
    ) -> Plan:
        settings, now = self.settings, snapshot.at_s
        if snapshot.busy:
            return Plan((), "an action is under way", state)
        asked = [evict for evict in asked_of(snapshot) if not state.handout.refuses_action(evict, now)]
        if asked:
            state = replace(self._regretting(state, now), others_s=now)
            return self._hand_out(snapshot, asked, "another model of the group needs the room", state)
        todo = state.handout.todo
        if todo and load.has_room(todo) and (shortage is None or not isinstance(todo[0], Replicate)):
            return self._hand_out(snapshot, todo, "the rest of the last decision", state)
        state = replace(state, handout=replace(state.handout, todo=()))
        if now - state.acted_s < settings.cooldown_s * (1 << state.handout.failures):
            return Plan((), "cooling down after an action", state)
        if shortage is not None:
            if state.pressed < settings.pressure_ticks:
                return Plan((), f"{why}, but not for long yet", state)
            return self._remedy(snapshot, load, shortage, why, state)
        if state.eased < settings.vacancy_ticks or now - state.pressed_s < self._dwell_s(state):
            return Plan((), "no shortage, but not for long yet", state)
        if state.reduced:
            return self._hand_out(snapshot, state.reduced, "the shortage has gone", replace(state, reduced=()))
        if state.others_s == now or now - state.others_s < self._dwell_s(state):
            return Plan((), "another model of the group is short, or was not long ago", state)
        if now - state.looked_s < settings.cooldown_s:
            return Plan((), "all is well; replicas would gain too little", state)
        return self._grow(snapshot, load, state)

    @property
    def _wait_s(self) -> float:
        """Before what came to nothing is asked for again, at first."""
        return max(self.settings.dwell_s, self.settings.cooldown_s)

    def _dwell_s(self, state: ScalingState) -> float:
        return self.settings.dwell_s * (1 << state.regrets)

    # -- with others

    def _remedy(self, snapshot: Snapshot, load: PlaceLoad, shortage: Deficit, why: str, state: ScalingState) -> Plan:
        """Guests leave first; where speed is short, what gains more together goes over. Then algorithm 2."""
        if not snapshot.others:
            return self._relieve(snapshot, load, shortage, why, state)
        if shortage.nbytes > 0:
            found = self._ask_others(snapshot, guests(load, snapshot, shortage, self.settings), state)
            reason = f"{why}: guests leave first"
        else:
            found = self._grow(snapshot, load, state, short=True)
            reason = f"{why}: {found.reason}"
        if found.actions or found.asks:
            return replace(found, reason=reason)
        return self._relieve(snapshot, load, shortage, why, state)

    def _share(self, snapshot: Snapshot, load: PlaceLoad, rows: int, model: CostModel, short: bool) -> SharedCapacity:
        if not snapshot.others:
            return SharedCapacity(load.places)
        if short:
            return take_over(load, snapshot, model, self.settings)
        return share_out(load, snapshot, rows, model, self.settings)

    def _ask_others(self, snapshot: Snapshot, asks: Sequence[EvictionRequest], state: ScalingState) -> Plan:
        """For as long as they are given; no asks where that was in vain."""
        if not asks:
            return Plan((), "others have nothing to give back", replace(state, asking_s=None))
        since = snapshot.at_s if state.asking_s is None else state.asking_s
        if snapshot.at_s - since > self.settings.patience_s:
            return Plan((), "others were asked for room in vain", state)
        return Plan((), "others give room back", replace(state, asking_s=since), asks=tuple(asks))

    # -- down

    def _instead(
        self, snapshot: Snapshot, load: PlaceLoad, shortage: Deficit, why: str, state: ScalingState
    ) -> list[Plan]:
        """Replicas leave, though layers could migrate; or replicas come, where it is speed that is short."""
        plans = [self._relieve(snapshot, load, shortage, why, state, ("eviction",))]
        if shortage.nbytes <= 0:
            plans.append(self._grow(snapshot, load, state))
        return [plan for plan in plans if plan.actions]

    def _relieve(
        self,
        snapshot: Snapshot,
        load: PlaceLoad,
        shortage: Deficit,
        why: str,
        state: ScalingState,
        remedies: Sequence[Remedy] = REMEDIES,
    ) -> Plan:
        settings = self.settings
        rows = max(1, load.rows) if shortage.nbytes <= 0 else 1  # what finds no KV block waits: that bound is there
        found = scale_down(
            load.placement,
            load.needs,
            load.places,
            self._model(max(1, load.rows)),
            shortage,
            rows=rows,
            delta=settings.delta,
            offload=settings.offload,
            remedies=remedies,
        )
        actions = found.actions
        if found.rows < rows and settings.offload:
            used = next(p.kv_used_bytes for p in snapshot.places if p.name == shortage.place)
            actions = (*actions, ResizeKV(shortage.place, used * found.rows // rows))
        actions = _releasable(actions, load.apart)
        allowed = tuple(action for action in actions if not state.handout.refuses_action(action, snapshot.at_s))
        if not allowed:
            return Plan((), f"{why}; no remedy is left", state)
        enough = "" if found.left.over else ", which does not suffice"
        undone = tuple(undo for action in allowed if (undo := _undo(action)) is not None)
        state = replace(state, pressed=0, reduced=(*state.reduced, *undone))
        return self._hand_out(snapshot, allowed, f"{why}: {found.remedy}{enough}", state)

    # -- up

    def _grow(self, snapshot: Snapshot, load: PlaceLoad, state: ScalingState, *, short: bool = False) -> Plan:
        settings, rows = self.settings, math.floor(state.rows + 0.5)
        if rows < 2:
            return Plan((), "all is well; one row cannot be split", state)
        if any(form != snapshot.layers[0] for form in snapshot.layers):
            return Plan((), "all is well; replicas wait until all layers are in one variant", state)
        if not snapshot.others and not any(place.vacancy > settings.t_up for place in load.places):
            return Plan((), "all is well; no place has room for replicas", state)
        model = self._model(rows)
        share = self._share(snapshot, load, rows, model, short)
        rooms = [p for p in share.rooms if not state.handout.refuses(Replicate, p.name, snapshot.at_s)]
        target = plan_up(load.placement, load.replica_needs, rooms, model, settings.t_up)
        if speedup(model, target) >= (1 + settings.least_gain) * speedup(model, load.placement):
            words = f"room for replicas: speed-up {speedup(model, target):.2f} expected"
            actions, state = difference(load.placement, target), replace(state, grown_s=snapshot.at_s)
            return self._hand_out(snapshot, actions, words, state)
        if share.gain >= 1 + settings.least_gain:
            return self._ask_others(snapshot, share.asks, state)
        return Plan((), "all is well; replicas would gain too little", replace(state, looked_s=snapshot.at_s))

    # -- both

    def _hand_out(self, snapshot: Snapshot, actions: Sequence[Action], why: str, state: ScalingState) -> Plan:
        """The first of these, within the bytes of one plan; the others follow when they are done."""
        handout = state.handout.handing(actions, snapshot, self._needs, self.settings.action_bytes)
        return Plan(handout.asked, why, replace(state, acted_s=snapshot.at_s, handout=handout))


def _releasable(actions: Sequence[Action], apart: Sequence[int]) -> tuple[Action, ...]:
    """The same, but that no layer is released of which modules are at other places, or go there now."""
    gone = {*apart, *(i for one in actions if isinstance(one, Migrate) and one.parts for i in one.layers)}
    found: list[Action] = []
    for one in actions:
        left = tuple(i for i in one.layers if i not in gone) if isinstance(one, Release) else ()
        if left or not isinstance(one, Release):
            found.append(Release(left) if left else one)
    return tuple(found)


def _undo(action: Action) -> Action | None:
    """Of a remedy that is taken back when the shortage has gone; what moved stays where it is."""
    if isinstance(action, Release):
        return Restore(action.layers)
    if isinstance(action, ResizeKV):
        return ResizeKV(action.place, None)
    return None
