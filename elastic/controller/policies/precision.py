"""The policy of the modes: layers are swapped under pressure, and return after it. (MorphServe, section 3)

At each tick the policy is in one `PrecisionPhase`: the first whose condition holds. Some phases wait, the others act.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from elastic.config import SLO, Policy
from elastic.controller.backoff import MOST_FAILURES, regretted
from elastic.controller.decision import Plan
from elastic.controller.policies.precision_steps import LayerSize, PrecisionStep, path, restores, still_there, swaps
from elastic.controller.policies.pressure import PressureReading, alone, entry, exit_wish, missed, share
from elastic.controller.sensors.gpu_headroom import reachable
from elastic.controller.sensors.sliding_window import BUCKET_S, BUCKETS, moving_average
from elastic.controller.snapshot import MemoryStats, RequestStats, Snapshot


class PrecisionPhase(Enum):
    """The state of the policy at one tick, in order of precedence. The value is the reason of its plan, or a part."""

    BUSY = "an action is under way"
    COOLING = "cooling down after an action"
    PRESSED = "but not for long yet"
    RELIEVING = "pressure"
    WELL = "all is well"
    NEEDED = "the load still needs the swapped layers' memory"
    DWELLING = "pressure has gone, but not for long yet"
    RESTORING = "pressure has gone"


@dataclass(frozen=True)
class PrecisionState:
    """The memory of the policy from tick to tick."""

    used_bytes: float | None = None
    """Moving average, as is `queue_s`."""
    queue_s: float = 0.0
    pressed: int = 0
    """Ticks of pressure in a row; 0 after a swap."""
    eased: int = 0
    """Ticks in a row in which layers could have returned."""
    pressure: str = ""
    """The last pressure, in words."""
    waits: int = 0
    """`RequestStats.kv_waits` at the last tick."""
    idle_since_s: float | None = None
    alone_since_s: float | None = None
    """Since when at most one request runs and none waits."""
    acted_s: float = -math.inf
    pressed_s: float = -math.inf
    """The last time of pressure."""
    done: tuple[PrecisionStep, ...] = ()
    """The steps that were done, the last one last."""
    done_before: tuple[PrecisionStep, ...] | None = None
    """`done` before the action whose outcome is not known yet."""
    asked: tuple[int, ...] = ()
    """The layers of the last action."""
    refused: tuple[int, ...] = ()
    """Layers of actions that came to nothing, the last ones last: others go before them."""
    failures: int = 0
    """Actions in a row that came to nothing."""
    restored_s: float = -math.inf
    """The last restore; -inf again after the swap that follows it."""
    regrets: int = 0
    """Restores in a row after which there was pressure again before long."""


class PrecisionPolicy:
    """Swaps layers to coarser variants in a given order while there is pressure; the last one returns first.

    `order` and `sizes` are of all decoder layers; `levels` are variants from fine to coarse. Pure: all that it
    remembers is in the state that it returns.
    """

    def __init__(
        self,
        settings: Policy,
        order: Sequence[int],
        levels: Sequence[str],
        sizes: Sequence[LayerSize],
        slo: SLO | None = None,
    ) -> None:
        self.settings = settings
        self.slo = slo
        self.tick_s = settings.tick_s
        self._path = path(order, levels, sizes, settings.max_layers)
        self._sizes = tuple(sizes)
        self._reserve_bytes = max((step.after_bytes for step in self._path), default=0)  # as `wrap` keeps back

    def decide(self, snapshot: Snapshot, state: PrecisionState | None = None) -> Plan:
        """Return the plan for now; its `state` is to be given at the next tick."""
        before = _with_outcome(state or PrecisionState(), snapshot)
        kv = reachable(snapshot.kv, snapshot.devices)
        reading = self._read(snapshot, kv, before)
        state = self._observe(snapshot, reading, before)
        plan = self._plan(snapshot, kv, state)
        reason = plan.reason + self._slo_words(snapshot.at_s, state, snapshot.traffic)
        figures = f"KV {reading.use:.0%}, {reading.base_use:.0%} without swapped layers; queue {reading.queue_s:.3f} s"
        return replace(plan, reason=reason, figures=plan.figures or figures)

    def _read(self, snapshot: Snapshot, kv: MemoryStats, state: PrecisionState) -> PressureReading:
        weight, queue_s = self.settings.ema_alpha, snapshot.traffic.queue_delay_s
        used_bytes = kv.used_bytes if state.used_bytes is None else state.used_bytes
        return PressureReading(
            used_bytes=moving_average(used_bytes, kv.used_bytes, weight),
            capacity_bytes=kv.capacity_bytes,
            base_bytes=kv.capacity_bytes - sum(step.before_bytes - step.after_bytes for step in state.done),
            queue_s=moving_average(state.queue_s, queue_s if math.isfinite(queue_s) else 0.0, weight),
            stalled=snapshot.traffic.kv_waits > state.waits,
            traffic=snapshot.traffic,
        )

    def _observe(self, snapshot: Snapshot, reading: PressureReading, state: PrecisionState) -> PrecisionState:
        """Count and time what is seen."""
        pressure = entry(reading, self.settings, self.slo)
        eased = not pressure and exit_wish(reading, self.settings, self.slo)
        idle_since_s = snapshot.at_s if state.idle_since_s is None else state.idle_since_s
        alone_since_s = snapshot.at_s if state.alone_since_s is None else state.alone_since_s
        return replace(
            state,
            used_bytes=reading.used_bytes,
            queue_s=reading.queue_s,
            pressed=state.pressed + 1 if pressure else 0,
            eased=state.eased + 1 if eased else 0,
            refused=() if eased and not state.done else state.refused,
            pressure=pressure or state.pressure,
            waits=snapshot.traffic.kv_waits,
            idle_since_s=idle_since_s if reading.idle else None,
            alone_since_s=alone_since_s if alone(snapshot.traffic) else None,
            pressed_s=snapshot.at_s if pressure else state.pressed_s,
        )

    def _phase(self, snapshot: Snapshot, state: PrecisionState, idle: bool) -> PrecisionPhase:
        now, settings = snapshot.at_s, self.settings
        conditions = {
            PrecisionPhase.BUSY: snapshot.busy,
            PrecisionPhase.COOLING: now - state.acted_s < settings.cooldown_s * 2**state.failures,
            PrecisionPhase.PRESSED: 0 < state.pressed < settings.pressure_ticks,
            PrecisionPhase.RELIEVING: state.pressed > 0,
            PrecisionPhase.WELL: not state.done,
            PrecisionPhase.NEEDED: state.eased < (1 if idle else settings.recovery_ticks),
            PrecisionPhase.DWELLING: not idle and now - state.pressed_s < settings.dwell_s * 2**state.regrets,
            PrecisionPhase.RESTORING: True,
        }
        return next(phase for phase, holds in conditions.items() if holds)

    def _plan(self, snapshot: Snapshot, kv: MemoryStats, state: PrecisionState) -> Plan:
        idle = state.idle_since_s is not None and snapshot.at_s - state.idle_since_s >= self.settings.idle_s
        phase = self._phase(snapshot, state, idle)
        match phase:
            case PrecisionPhase.PRESSED:
                return Plan((), f"{state.pressure}, {phase.value}", state)
            case PrecisionPhase.RELIEVING:
                return self._relieve(snapshot, state)
            case PrecisionPhase.RESTORING:
                return self._restore(snapshot, kv, state, idle)
        return Plan((), phase.value, state)

    def _relieve(self, snapshot: Snapshot, state: PrecisionState) -> Plan:
        """Swap the next layers of the order."""
        now, limit = snapshot.at_s, snapshot.kv.limit_bytes
        if limit is not None and limit < snapshot.kv.maximum_bytes:
            return Plan((), f"{state.pressure}; its limit was set by hand, swapping would not raise it", state)
        possible = [step for step in self._path if snapshot.layers[step.layer] == step.before]
        chosen = self._within_budget(_in_turn(possible, snapshot, state), lambda step: step.after_bytes)
        if not chosen:
            replicas = ", but for those with replicas" if possible else ""
            return Plan((), f"{state.pressure}; all layers that may be swapped are{replicas}", state)
        asked = replace(
            state,
            acted_s=now,
            pressed=0,
            asked=tuple(step.layer for step in chosen),
            done_before=state.done,
            done=(*state.done, *chosen),
            regrets=regretted(state.regrets, state.restored_s, now, self.settings.dwell_s),
            restored_s=-math.inf,
        )
        return Plan(swaps(chosen), state.pressure, asked)

    def _restore(self, snapshot: Snapshot, kv: MemoryStats, state: PrecisionState, idle: bool) -> Plan:
        """Undo the last steps: as many as may be, are possible, and leave KV use well below the entry threshold."""
        chosen: Sequence[PrecisionStep] = _in_turn(state.done[::-1], snapshot, state)
        if not idle:
            chosen = self._within_budget(chosen, lambda step: step.before_bytes)
        chosen, waits_for, figures = self._possible(kv, state, chosen)
        if not chosen:
            waits_for = waits_for or "until their replicas have left"
            return Plan((), f"layers could return; waits {waits_for}", state, figures)
        now = snapshot.at_s
        asked = replace(
            state,
            acted_s=now,
            eased=0,
            asked=tuple(step.layer for step in chosen),
            done_before=state.done,
            restored_s=now,
        )
        return Plan(restores(chosen, self._sizes), "no requests" if idle else PrecisionPhase.RESTORING.value, asked)

    def _possible(
        self, kv: MemoryStats, state: PrecisionState, wanted: Sequence[PrecisionStep]
    ) -> tuple[Sequence[PrecisionStep], str, str]:
        """Return the steps that can be undone now, and the condition that the next one waits for, with figures."""
        used = max(kv.used_bytes, state.used_bytes or 0.0)
        highest = self.settings.kv_high - self.settings.margin
        taken = arriving = 0
        for number, step in enumerate(wanted):
            taken += step.before_bytes - step.after_bytes
            arriving += step.before_bytes
            needed = max(taken, arriving - self._reserve_bytes)
            free = kv.capacity_bytes - kv.used_bytes
            if needed > free:
                return wanted[:number], "until enough KV memory is free", f"needs {needed:,} bytes, {free:,} are free"
            use = share(used, kv.capacity_bytes - taken)
            if use > highest:
                return wanted[:number], "until KV use would stay low", f"it would be {use:.0%}, not {highest:.0%}"
        return wanted, "", ""

    def _within_budget(
        self, steps: Sequence[PrecisionStep], nbytes: Callable[[PrecisionStep], int]
    ) -> Sequence[PrecisionStep]:
        """Return the first steps, within the layers and the bytes of one action, but one at least."""
        copied, most = 0, self.settings.layers_per_action
        for number, step in enumerate(steps[:most]):
            copied += nbytes(step)
            if number and copied > self.settings.action_bytes:
                return steps[:number]
        return steps[:most]

    def _slo_words(self, at_s: float, state: PrecisionState, traffic: RequestStats) -> str:
        """Name an SLO that is missed though, for as long as is remembered, no request had another in its way."""
        missing = missed(traffic, self.slo)
        if not missing or state.alone_since_s is None or at_s - state.alone_since_s < BUCKETS * BUCKET_S:
            return ""
        return f"; {' and '.join(missing)} missed by requests that are alone, which no action would change"


def _with_outcome(state: PrecisionState, snapshot: Snapshot) -> PrecisionState:
    """Add the outcome of the last action, once that is known, and of what others did."""
    if snapshot.busy:
        return state
    if state.done_before is None:  # a layer that is not as its last step left it is whoever's who changed it
        last = {step.layer: step.after for step in state.done}
        done = tuple(step for step in state.done if snapshot.layers[step.layer] == last[step.layer])
        return state if done == state.done else replace(state, done=done)
    done = still_there(state.done, snapshot.layers)
    refused = tuple(layer for layer in state.refused if layer not in state.asked)
    if done != state.done_before:
        return replace(state, done=done, done_before=None, refused=refused, failures=0)
    failures = min(state.failures + 1, MOST_FAILURES)
    return replace(state, done=done, done_before=None, refused=(*refused, *state.asked), failures=failures)


def _in_turn(steps: Sequence[PrecisionStep], snapshot: Snapshot, state: PrecisionState) -> Sequence[PrecisionStep]:
    """Return those of the steps that may be done now: none of a layer with replicas, which would not follow.

    Those of layers that were refused come when there are no others, one alone, and each in its turn: of several layers
    it is not known which could not be done.
    """
    places = snapshot.residencies
    alone = [step for step in steps if not places or len(places[step.layer]) == 1]
    others = [step for step in alone if step.layer not in state.refused]
    return others or sorted(alone, key=lambda step: state.refused.index(step.layer))[:1]
