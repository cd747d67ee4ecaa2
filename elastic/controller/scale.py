"""The policy `scale`: replicas where there is room, less where there is a shortage. (CoCoServe, sections 4 and 5)"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from elastic.config import SLO, Scale
from elastic.controller.handout import MOST_DOUBLINGS, Handout
from elastic.controller.load import Load, describe, find_shortage
from elastic.controller.placement import Need, difference
from elastic.controller.plan import Plan
from elastic.controller.scale_down import REMEDIES, Remedy, Shortage, scale_down
from elastic.controller.search import plan_up
from elastic.controller.snapshot import Snapshot
from elastic.controller.speedup import CostModel, speedup
from elastic.types import Action, Release, Replicate, ResizeKV, Restore

ROWS_ALPHA = 0.1


@dataclass(frozen=True)
class ScaleState:
    """What the policy remembers from tick to tick."""

    pressed: int = 0
    """Ticks of shortage in a row."""
    eased: int = 0
    pressed_s: float = -math.inf
    acted_s: float = -math.inf
    grown_s: float = -math.inf
    """When replicas were added last."""
    regrets: int = 0
    """Shortages in a row that came soon after replicas."""
    rows: float = 0.0
    """Moving average of the requests that run."""
    waits: int = 0
    """How often requests had found no KV block."""
    handout: Handout = field(default_factory=Handout)
    reduced: tuple[Action, ...] = ()
    """What undoes the releases and limits that are in force."""


class ScalePolicy:
    """`needs` are of all decoder layers, as bytes; `model` makes the cost model for so many rows. Pure."""

    def __init__(
        self,
        settings: Scale,
        needs: Sequence[Need],
        model: Callable[[int], CostModel],
        slo: SLO | None = None,
    ) -> None:
        self.settings = settings
        self.slo = slo
        self.tick_s = settings.tick_s
        self._needs = tuple(needs)
        self._model = model

    def decide(self, snapshot: Snapshot, state: ScaleState | None = None) -> Plan:
        """What to do now; the plan's `state` is what it wants to be given at the next tick."""
        return self.options(snapshot, state)[0]

    def options(self, snapshot: Snapshot, state: ScaleState | None = None) -> tuple[Plan, ...]:
        """What `decide` says, then whatever else could be done instead: an arbiter may find it cheaper."""
        before = state or ScaleState()
        before = replace(before, handout=before.handout.settled(snapshot, self._wait_s))
        if len(snapshot.places) < 2 or not snapshot.residencies:
            return (Plan((), "there is one place only", before),)
        load = describe(snapshot, self._needs, self.settings)
        shortage, why = find_shortage(snapshot, load, self.settings, self.slo, before.waits)
        state = self._count(snapshot, shortage, before)
        plans = [self._choose(snapshot, load, shortage, why, state)]
        if plans[0].actions and shortage is not None and not before.handout.todo:
            plans += self._instead(snapshot, load, shortage, why, state)
        free = ", ".join(f"{p.name} {p.vacancy:.0%}" for p in load.places)
        return tuple(replace(plan, figures=f"free: {free}; {load.rows} rows") for plan in plans)

    def _count(self, snapshot: Snapshot, shortage: Shortage | None, state: ScaleState) -> ScaleState:
        now, running = snapshot.at_s, snapshot.traffic.running
        soon = now - state.grown_s < 4 * self._dwell_s(state)
        regretted = shortage is not None and soon and not state.pressed
        return replace(
            state,
            pressed=state.pressed + 1 if shortage else 0,
            eased=0 if shortage else state.eased + 1,
            pressed_s=now if shortage else state.pressed_s,
            grown_s=-math.inf if regretted else state.grown_s,
            regrets=min(MOST_DOUBLINGS, state.regrets + 1) if regretted else state.regrets,
            rows=state.rows + ROWS_ALPHA * (running - state.rows),
            waits=snapshot.traffic.stalls + snapshot.traffic.preemptions,
        )

    def _choose(self, snapshot: Snapshot, load: Load, shortage: Shortage | None, why: str, state: ScaleState) -> Plan:
        settings, now = self.settings, snapshot.at_s
        if snapshot.busy:
            return Plan((), "an action is under way", state)
        todo = state.handout.todo
        if todo and (shortage is None or not isinstance(todo[0], Replicate)):
            return self._hand_out(snapshot, todo, "the rest of the last decision", state)
        state = replace(state, handout=replace(state.handout, todo=()))
        if now - state.acted_s < settings.cooldown_s * (1 << state.handout.failures):
            return Plan((), "cooling down after an action", state)
        if shortage is not None:
            if state.pressed < settings.pressure_ticks:
                return Plan((), f"{why}, but not for long yet", state)
            return self._relieve(snapshot, load, shortage, why, state)
        if state.eased < settings.vacancy_ticks or now - state.pressed_s < self._dwell_s(state):
            return Plan((), "no shortage, but not for long yet", state)
        if state.reduced:
            return self._hand_out(snapshot, state.reduced, "the shortage has gone", replace(state, reduced=()))
        return self._grow(snapshot, load, state)

    @property
    def _wait_s(self) -> float:
        """Before what came to nothing is asked for again, at first."""
        return max(self.settings.dwell_s, self.settings.cooldown_s)

    def _dwell_s(self, state: ScaleState) -> float:
        return self.settings.dwell_s * (1 << state.regrets)

    # -- down

    def _instead(self, snapshot: Snapshot, load: Load, shortage: Shortage, why: str, state: ScaleState) -> list[Plan]:
        """Replicas leave, though layers could migrate; or replicas come, where it is speed that is short."""
        plans = [self._relieve(snapshot, load, shortage, why, state, ("eviction",))]
        if shortage.nbytes <= 0:
            plans.append(self._grow(snapshot, load, state))
        return [plan for plan in plans if plan.actions]

    def _relieve(
        self,
        snapshot: Snapshot,
        load: Load,
        shortage: Shortage,
        why: str,
        state: ScaleState,
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
        allowed = tuple(action for action in actions if not state.handout.refuses_action(action, snapshot.at_s))
        if not allowed:
            return Plan((), f"{why}; no remedy is left", state)
        enough = "" if found.left.over else ", which does not suffice"
        undone = tuple(undo for action in allowed if (undo := _undo(action, snapshot)) is not None)
        state = replace(state, pressed=0, reduced=(*state.reduced, *undone))
        return self._hand_out(snapshot, allowed, f"{why}: {found.remedy}{enough}", state)

    # -- up

    def _grow(self, snapshot: Snapshot, load: Load, state: ScaleState) -> Plan:
        settings, rows = self.settings, math.floor(state.rows + 0.5)
        if rows < 2:
            return Plan((), "all is well; one row cannot be split", state)
        if any(form != snapshot.layers[0] for form in snapshot.layers):
            return Plan((), "all is well; replicas wait until all layers are in one variant", state)
        places = [place for place in load.places if not state.handout.refuses(Replicate, place.name, snapshot.at_s)]
        if not any(place.vacancy > settings.t_up for place in places):
            return Plan((), "all is well; no place has room for replicas", state)
        model = self._model(rows)
        target = plan_up(load.placement, load.replica_needs, places, model, settings.t_up)
        gain = speedup(model, target) / speedup(model, load.placement)
        if gain < 1 + settings.least_gain:
            return Plan((), "all is well; replicas would gain too little", state)
        words = f"room for replicas: speed-up {speedup(model, target):.2f} expected"
        return self._hand_out(
            snapshot, difference(load.placement, target), words, replace(state, grown_s=snapshot.at_s)
        )

    # -- both

    def _hand_out(self, snapshot: Snapshot, actions: Sequence[Action], why: str, state: ScaleState) -> Plan:
        """The first of these, within the bytes of one plan; the others follow when they are done."""
        handout = state.handout.handing(actions, snapshot, self._needs, self.settings.action_bytes)
        return Plan(handout.asked, why, replace(state, acted_s=snapshot.at_s, handout=handout))


def _undo(action: Action, snapshot: Snapshot) -> Action | None:
    """Of a remedy that is taken back when the shortage has gone; what moved stays where it is."""
    if isinstance(action, Release):
        return Restore(action.layers)
    if isinstance(action, ResizeKV):
        most = next(p.kv_maximum_bytes for p in snapshot.places if p.name == action.place)
        return ResizeKV(action.place, most)
    return None
