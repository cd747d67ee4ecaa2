"""The policy `scale`: replicas where there is room, less where there is a shortage. (CoCoServe, sections 4 and 5)

At each tick the policy is in one `ScalingPhase`: the first whose condition holds. Some phases wait, the others act.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from elastic.config import SLO, Scale
from elastic.controller.backoff import regretted
from elastic.controller.decision import Plan
from elastic.controller.policies.rollout import MOST_DOUBLINGS, Rollout
from elastic.controller.policies.sharing import SharedCapacity
from elastic.controller.policies.shortage import ROWS_WEIGHT, describe, find_shortage
from elastic.controller.sensors.sliding_window import moving_average
from elastic.controller.snapshot import EvictionRequest, Snapshot
from elastic.planning.cost_model import CostModel, speedup
from elastic.planning.local_search import plan_up
from elastic.planning.placement import ResourceDemand, difference
from elastic.planning.scale_down import REMEDIES, Deficit, Remedy, scale_down
from elastic.types import Action, Evict, Release, Replicate, ResizeKV, Restore

ASK_AGAIN = 3
"""Times its patience, after which a model that asked in vain asks again."""


class ScalingPhase(Enum):
    """The state of the policy at one tick, in order of precedence. The value is the reason of its plan, or a part."""

    BUSY = "an action is under way"
    EVICTING = "another model of the group needs the room"
    CONTINUING = "the rest of the last decision"
    COOLING = "cooling down after an action"
    PRESSED = "but not for long yet"
    RELIEVING = "a shortage"
    EASED = "no shortage, but not for long yet"
    UNDOING = "the shortage has gone"
    YIELDING = "another model of the group is short, or was not long ago"
    RESTING = "all is well; replicas would gain too little"
    GROWING = "room for replicas"


@dataclass(frozen=True)
class Times:
    """The last time of each thing, in seconds of the snapshots' clock; -inf: never."""

    shortage_s: float = -math.inf
    peer_shortage_s: float = -math.inf
    """Another model of the group was short, or needed the room of a replica."""
    action_s: float = -math.inf
    growth_s: float = -math.inf
    """Replicas were added; -inf too once they were regretted."""
    search_s: float = -math.inf
    """No replicas were found that gain enough."""


@dataclass(frozen=True)
class ScalingState:
    """The memory of the policy from tick to tick."""

    pressed: int = 0
    """Ticks of shortage in a row; 0 after a remedy."""
    eased: int = 0
    """Ticks without a shortage in a row."""
    last: Times = Times()
    asking_since_s: float | None = None
    """Since when peers are asked to take replicas away."""
    regrets: int = 0
    """Shortages in a row that came soon after replicas; each doubles the dwell."""
    rows: float = 0.0
    """Moving average of the running requests."""
    waits: int = 0
    """`RequestStats.kv_waits` at the last tick."""
    rollout: Rollout = field(default_factory=Rollout)
    undo: tuple[Action, ...] = ()
    """The actions that take back the releases and limits in force: each until it is done."""


@dataclass(frozen=True)
class Situation:
    """A snapshot, and the conclusions from it."""

    snapshot: Snapshot
    shared: SharedCapacity
    evictions: Sequence[Evict]
    """Replicas that peers want to leave, but for those whose eviction failed just now."""
    shortage: Deficit | None
    why: str
    """The reason to see a shortage, in words."""


class ScalingPolicy:
    """Replicates layers where there is room, and relieves places that are short. Pure.

    `needs` are of all decoder layers, in bytes; `model` makes the cost model for a number of rows.
    """

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
        self._retry_s = max(settings.dwell_s, settings.cooldown_s)
        """Before an action that failed is asked for again, at first."""

    def decide(self, snapshot: Snapshot, state: ScalingState | None = None) -> Plan:
        """Return the plan for now; its `state` is to be given at the next tick."""
        return self.options(snapshot, state)[0]

    def options(self, snapshot: Snapshot, state: ScalingState | None = None) -> tuple[Plan, ...]:
        """Return the plan of `decide`, then alternatives to it: an arbiter may find one cheaper."""
        before = state or ScalingState()
        done = before.rollout.done(snapshot)
        undo = tuple(action for action in before.undo if action not in done)
        before = replace(before, undo=undo, rollout=before.rollout.with_outcome(snapshot, self._retry_s))
        if len(snapshot.places) < 2 or not snapshot.residencies:
            return (Plan((), "there is one place only", before),)
        shared = SharedCapacity(describe(snapshot, self._needs, self.settings), snapshot, self.settings)
        shortage, why = find_shortage(snapshot, shared.load, self.settings, self.slo, before.waits)
        evictions = [evict for evict in shared.requested() if not before.rollout.refuses(evict, snapshot.at_s)]
        situation = Situation(snapshot, shared, evictions, shortage, why)
        state = self._observe(situation, before)
        plans = [self._plan(situation, state)]
        if plans[0].actions and shortage is not None and not before.rollout.remaining:
            plans.append(self._scale_down(situation, shortage, state, ("eviction",)))
            if shortage.nbytes <= 0:
                plans.append(self._grow(situation, state))
        free = ", ".join(f"{place.name} {place.vacancy:.0%}" for place in shared.load.places)
        figures, short = f"free: {free}; {shared.load.rows} rows", shortage is not None or bool(before.undo)
        useful = [plans[0], *(plan for plan in plans[1:] if plan.actions)]
        return tuple(replace(plan, figures=figures, short=short) for plan in useful)

    def _observe(self, situation: Situation, state: ScalingState) -> ScalingState:
        """Count and time what is seen."""
        snapshot, short = situation.snapshot, situation.shortage is not None
        now, asking_since_s = snapshot.at_s, state.asking_since_s
        if short and not state.pressed:
            state = self._with_regret(state, now)
        if asking_since_s is not None and now - asking_since_s > ASK_AGAIN * self.settings.patience_s + self._retry_s:
            asking_since_s = None
        last = state.last
        peer_short = any(peer.short for peer in snapshot.others)
        return replace(
            state,
            pressed=state.pressed + 1 if short else 0,
            eased=0 if short else state.eased + 1,
            last=replace(
                last,
                shortage_s=now if short else last.shortage_s,
                peer_shortage_s=now if peer_short else last.peer_shortage_s,
            ),
            asking_since_s=asking_since_s if short or not state.pressed else None,
            rows=moving_average(state.rows, snapshot.traffic.running, ROWS_WEIGHT),
            waits=snapshot.traffic.kv_waits,
        )

    def _with_regret(self, state: ScalingState, now: float) -> ScalingState:
        """Count it if replicas have to leave soon after they came: the next will be longer in coming."""
        regrets = regretted(state.regrets, state.last.growth_s, now, self.settings.dwell_s, MOST_DOUBLINGS)
        return replace(state, last=replace(state.last, growth_s=-math.inf), regrets=regrets)

    def _phase(self, situation: Situation, state: ScalingState) -> ScalingPhase:
        settings, now, last = self.settings, situation.snapshot.at_s, state.last
        short, remaining = situation.shortage is not None, state.rollout.remaining
        dwell_s = settings.dwell_s * 2**state.regrets
        wanted = bool(remaining) and not (short and isinstance(remaining[0], Replicate))
        conditions = {
            ScalingPhase.BUSY: situation.snapshot.busy,
            ScalingPhase.EVICTING: bool(situation.evictions),
            ScalingPhase.CONTINUING: wanted and situation.shared.load.has_room(remaining),
            ScalingPhase.COOLING: now - last.action_s < settings.cooldown_s * 2**state.rollout.failures,
            ScalingPhase.PRESSED: short and state.pressed < settings.pressure_ticks,
            ScalingPhase.RELIEVING: short,
            ScalingPhase.EASED: state.eased < settings.vacancy_ticks or now - last.shortage_s < dwell_s,
            ScalingPhase.UNDOING: bool(state.undo),
            ScalingPhase.YIELDING: last.peer_shortage_s == now or now - last.peer_shortage_s < dwell_s,
            ScalingPhase.RESTING: now - last.search_s < settings.cooldown_s,
            ScalingPhase.GROWING: True,
        }
        return next(phase for phase, holds in conditions.items() if holds)

    def _plan(self, situation: Situation, state: ScalingState) -> Plan:
        phase, remaining = self._phase(situation, state), state.rollout.remaining
        if phase is not ScalingPhase.BUSY:  # what remains is done now or never
            state = replace(state, rollout=replace(state.rollout, remaining=()))
        match phase:
            case ScalingPhase.EVICTING:
                now = situation.snapshot.at_s
                state = self._with_regret(state, now)
                state = replace(state, last=replace(state.last, peer_shortage_s=now))
                return self._issue(situation, situation.evictions, phase.value, state)
            case ScalingPhase.CONTINUING:
                return self._issue(situation, remaining, phase.value, state)
            case ScalingPhase.PRESSED:
                return Plan((), f"{situation.why}, {phase.value}", state)
            case ScalingPhase.RELIEVING if situation.shortage is not None:
                return self._relieve(situation, situation.shortage, state)
            case ScalingPhase.UNDOING:
                undo = [action for action in state.undo if not state.rollout.refuses(action, situation.snapshot.at_s)]
                if not undo:
                    return Plan((), f"{phase.value}, but what was released or limited could not return yet", state)
                return self._issue(situation, undo, phase.value, state)
            case ScalingPhase.GROWING:
                return self._grow(situation, state)
        return Plan((), phase.value, state)

    def _issue(self, situation: Situation, actions: Sequence[Action], why: str, state: ScalingState) -> Plan:
        """Ask for the first of these actions, within the bytes of one plan; the others follow when they are done."""
        rollout = state.rollout.issue(actions, situation.snapshot, self._needs, self.settings.action_bytes)
        last = replace(state.last, action_s=situation.snapshot.at_s)
        return Plan(rollout.issued, why, replace(state, last=last, rollout=rollout))

    def _relieve(self, situation: Situation, shortage: Deficit, state: ScalingState) -> Plan:
        """Ask peers first: for guests' room, or where speed is short for what gains more here. Then algorithm 2."""
        if situation.snapshot.others:
            if shortage.nbytes > 0:
                plan = self._ask_peers(situation, situation.shared.guests(shortage), state)
                reason = "guests leave first"
            else:
                plan = self._grow(situation, state, take_over=True)
                reason = plan.reason
            if plan.actions or plan.asks:
                return replace(plan, reason=f"{situation.why}: {reason}")
        return self._scale_down(situation, shortage, state)

    def _ask_peers(self, situation: Situation, asks: Sequence[EvictionRequest], state: ScalingState) -> Plan:
        """Ask for as long as peers are given; the plan has no asks where that was in vain."""
        now = situation.snapshot.at_s
        if not asks:
            return Plan((), "others have nothing to give back", replace(state, asking_since_s=None))
        since_s = now if state.asking_since_s is None else state.asking_since_s
        if now - since_s > self.settings.patience_s:
            return Plan((), "others were asked for room in vain", state)
        return Plan((), "others give room back", replace(state, asking_since_s=since_s), asks=tuple(asks))

    def _scale_down(
        self, situation: Situation, shortage: Deficit, state: ScalingState, remedies: Sequence[Remedy] = REMEDIES
    ) -> Plan:
        settings, snapshot, load = self.settings, situation.snapshot, situation.shared.load
        rows = max(1, load.rows) if shortage.nbytes <= 0 else 1  # what finds no KV block waits: that bound is there
        result = scale_down(
            load.placement,
            load.needs,
            load.places,
            self._model(max(1, load.rows)),
            shortage,
            rows=rows,
            delta=settings.delta,
            offload=settings.offload,
            remedies=remedies,
            apart=load.apart,
        )
        actions = list(result.actions)
        if result.rows < rows and settings.offload:
            used = next(place.kv_used_bytes for place in snapshot.places if place.name == shortage.place)
            actions.append(ResizeKV(shortage.place, used * result.rows // rows))
        allowed = [action for action in actions if not state.rollout.refuses(action, snapshot.at_s)]
        if not allowed:
            return Plan((), f"{situation.why}; no remedy is left", state)
        enough = "" if result.left.over else ", which does not suffice"
        state = replace(state, pressed=0, undo=_undo(allowed, snapshot, state.undo))
        return self._issue(situation, allowed, f"{situation.why}: {result.remedy}{enough}", state)

    def _grow(self, situation: Situation, state: ScalingState, *, take_over: bool = False) -> Plan:
        """Add replicas that gain enough, or ask peers for the room; with `take_over` for room that they use."""
        settings, snapshot, load = self.settings, situation.snapshot, situation.shared.load
        now, rows = snapshot.at_s, math.floor(state.rows + 0.5)
        if rows < 2:
            return Plan((), "all is well; one row cannot be split", state)
        if any(variant != snapshot.layers[0] for variant in snapshot.layers):
            return Plan((), "all is well; replicas wait until all layers are in one variant", state)
        if not snapshot.others and not any(place.vacancy > settings.t_up for place in load.places):
            return Plan((), "all is well; no place has room for replicas", state)
        model = self._model(rows)
        offer = situation.shared.take_over(model) if take_over else situation.shared.fair_share(model)
        places = [place for place in offer.places if not state.rollout.refuses(Replicate((), place.name), now)]
        target = plan_up(load.placement, load.replica_needs, places, model, settings.t_up)
        if speedup(model, target) >= (1 + settings.least_gain) * speedup(model, load.placement):
            words = f"{ScalingPhase.GROWING.value}: speed-up {speedup(model, target):.2f} expected"
            state = replace(state, last=replace(state.last, growth_s=now))
            return self._issue(situation, difference(load.placement, target), words, state)
        if offer.gain >= 1 + settings.least_gain:
            return self._ask_peers(situation, offer.asks, state)
        return Plan((), ScalingPhase.RESTING.value, replace(state, last=replace(state.last, search_s=now)))


def _undo(actions: Sequence[Action], snapshot: Snapshot, before: Sequence[Action]) -> tuple[Action, ...]:
    """Return what takes back releases and limits, behind what does so already. What moved stays where it is.

    A limit returns to what it was before the first of them: it may have been set by hand.
    """
    limits = {place.name: place.kv_limit_bytes for place in snapshot.places}
    limited = {action.place for action in before if isinstance(action, ResizeKV)}
    undo = list(before)
    for action in actions:
        if isinstance(action, Release):
            undo.append(Restore(action.layers))
        elif isinstance(action, ResizeKV) and action.place not in limited:
            undo.append(ResizeKV(action.place, limits[action.place]))
    return tuple(dict.fromkeys(undo))
