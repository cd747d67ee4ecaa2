"""The policy of the modes: layers are swapped under pressure, and return after it (MorphServe, section 3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from elastic.config import SLO, Policy
from elastic.controller.decision import Plan
from elastic.controller.policies.precision_steps import LayerSize, Step, path, restores, still_there, swaps
from elastic.controller.policies.pressure import PressureReading, alone, entry, exit_wish, missed, share
from elastic.controller.sensors.gpu_headroom import reachable
from elastic.controller.sensors.sliding_window import BUCKET_S, BUCKETS
from elastic.controller.snapshot import MemoryStats, RequestStats, Snapshot

MOST_FAILURES = 7
"""The cooldown doubles with each action in a row that came to nothing, so many times at most."""
MOST_REGRETS = 3
"""The dwell doubles with each restore in a row that came too early, so many times at most."""


@dataclass(frozen=True)
class PrecisionState:
    """What the policy remembers from tick to tick."""

    used_bytes: float | None = None
    """Moving average, as is `queue_s`."""
    queue_s: float = 0.0
    pressed: int = 0
    """Ticks of pressure in a row."""
    eased: int = 0
    """Ticks in a row in which layers could have returned."""
    pressure: str = ""
    """Of what kind it was last."""
    waits: int = 0
    """How often requests had found no KV block."""
    idle_since_s: float | None = None
    alone_since_s: float | None = None
    """Since when at most one request runs and none waits."""
    acted_s: float = -math.inf
    pressed_s: float = -math.inf
    """When there was pressure last, or a swap."""
    done: tuple[Step, ...] = ()
    """The steps that were done, the last one last."""
    before: tuple[Step, ...] | None = None
    """What `done` was before the action whose outcome is not known yet."""
    failures: int = 0
    """Actions in a row that came to nothing."""
    restored_s: float = -math.inf
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
        """What to do now; the plan's `state` is what it wants to be given at the next tick."""
        before = _settled(state or PrecisionState(), snapshot)
        kv = reachable(snapshot.kv, snapshot.devices)
        reading = self._read(snapshot, kv, before)
        now = self._count(snapshot, reading, before)
        plan = self._choose(snapshot, kv, reading, now)
        words = self._slo_words(snapshot.at_s, now, snapshot.traffic)
        figures = f"KV {reading.use:.0%}, {reading.base_use:.0%} without swapped layers; queue {reading.queue_s:.3f} s"
        return replace(plan, reason=plan.reason + words, figures=plan.figures or figures)

    # -- what is seen

    def _read(self, snapshot: Snapshot, kv: MemoryStats, state: PrecisionState) -> PressureReading:
        alpha = self.settings.ema_alpha
        used = kv.used_bytes if state.used_bytes is None else state.used_bytes
        queue = snapshot.traffic.queue_delay_s
        return PressureReading(
            used_bytes=used + alpha * (kv.used_bytes - used),
            capacity_bytes=kv.capacity_bytes,
            base_bytes=kv.capacity_bytes - sum(step.freed_bytes for step in state.done),
            queue_s=state.queue_s + alpha * ((queue if math.isfinite(queue) else 0.0) - state.queue_s),
            stalled=_waits(snapshot) > state.waits,
            traffic=snapshot.traffic,
        )

    def _count(self, snapshot: Snapshot, reading: PressureReading, state: PrecisionState) -> PrecisionState:
        pressure = entry(reading, self.settings, self.slo)
        eased = not pressure and exit_wish(reading, self.settings, self.slo)
        idle_since = snapshot.at_s if state.idle_since_s is None else state.idle_since_s
        alone_since = snapshot.at_s if state.alone_since_s is None else state.alone_since_s
        return replace(
            state,
            used_bytes=reading.used_bytes,
            queue_s=reading.queue_s,
            pressed=state.pressed + 1 if pressure else 0,
            eased=state.eased + 1 if eased else 0,
            pressure=pressure or state.pressure,
            waits=_waits(snapshot),
            idle_since_s=idle_since if reading.idle else None,
            alone_since_s=alone_since if alone(snapshot.traffic) else None,
            pressed_s=snapshot.at_s if pressure else state.pressed_s,
        )

    # -- what is done

    def _choose(self, snapshot: Snapshot, kv: MemoryStats, reading: PressureReading, state: PrecisionState) -> Plan:
        now, settings = snapshot.at_s, self.settings
        if snapshot.busy:
            return Plan((), "an action is under way", state)
        if now - state.acted_s < settings.cooldown_s * (1 << state.failures):
            return Plan((), "cooling down after an action", state)
        if state.pressed:
            if state.pressed < settings.pressure_ticks:
                return Plan((), f"{state.pressure}, but not for long yet", state)
            return self._relieve(snapshot, state)
        if not state.done:
            return Plan((), "all is well", state)
        idle = state.idle_since_s is not None and now - state.idle_since_s >= settings.idle_s
        if state.eased < (1 if idle else settings.recovery_ticks):
            return Plan((), "the load still needs the swapped layers' memory", state)
        if not idle and now - state.pressed_s < self._dwell_s(state):
            return Plan((), "pressure has gone, but not for long yet", state)
        return self._return(snapshot, kv, state, idle)

    def _relieve(self, snapshot: Snapshot, state: PrecisionState) -> Plan:
        """Swap the next layers of the order."""
        limit = snapshot.kv.limit_bytes
        if limit is not None and limit < snapshot.kv.maximum_bytes:
            return Plan((), f"{state.pressure}; its limit was set by hand, swapping would not raise it", state)
        left = [step for step in self._path if snapshot.layers[step.layer] == step.before]
        chosen = self._budgeted(left, self.settings.layers_per_action, lambda step: step.after_bytes)
        if not chosen:
            return Plan((), f"{state.pressure}; all layers that may be swapped are", state)
        asked = replace(
            state,
            acted_s=snapshot.at_s,
            pressed=0,
            before=state.done,
            done=(*state.done, *chosen),
            regrets=self._regrets(snapshot.at_s, state),
            restored_s=-math.inf,
        )
        return Plan(swaps(chosen), state.pressure, asked)

    def _dwell_s(self, state: PrecisionState) -> float:
        return self.settings.dwell_s * (1 << state.regrets)

    def _regrets(self, now: float, state: PrecisionState) -> int:
        """One more if layers that were restored just now must leave again; none any more after a long time."""
        if state.restored_s == -math.inf:
            return state.regrets
        early = now - state.restored_s < 4 * self._dwell_s(state)
        return min(state.regrets + 1, MOST_REGRETS) if early else 0

    def _return(self, snapshot: Snapshot, kv: MemoryStats, state: PrecisionState, idle: bool) -> Plan:
        """Undo the last steps: as many as may be, are possible, and leave KV use well below the entry threshold."""
        chosen: Sequence[Step] = state.done[::-1]
        if not idle:
            chosen = self._budgeted(chosen, self.settings.layers_per_action, lambda step: step.before_bytes)
        chosen, waits_for, figures = self._possible(kv, state, chosen)
        if not chosen:
            return Plan((), f"layers could return; waits {waits_for}", state, figures)
        asked = replace(state, acted_s=snapshot.at_s, eased=0, before=state.done, restored_s=snapshot.at_s)
        return Plan(restores(chosen, self._sizes), "no requests" if idle else "pressure has gone", asked)

    def _possible(
        self, kv: MemoryStats, state: PrecisionState, wanted: Sequence[Step]
    ) -> tuple[Sequence[Step], str, str]:
        """As many of the steps as can be undone now, and for the next one what it waits for, with figures."""
        used = max(kv.used_bytes, state.used_bytes or 0.0)
        highest = self.settings.kv_high - self.settings.margin
        taken = arriving = 0
        for number, step in enumerate(wanted):
            taken += step.freed_bytes
            arriving += step.before_bytes
            needed = max(taken, arriving - self._reserve_bytes)
            free = kv.capacity_bytes - kv.used_bytes
            if needed > free:
                return wanted[:number], "until enough KV memory is free", f"needs {needed:,} bytes, {free:,} are free"
            use = share(used, kv.capacity_bytes - taken)
            if use > highest:
                return wanted[:number], "until KV use would stay low", f"it would be {use:.0%}, not {highest:.0%}"
        return wanted, "", ""

    def _budgeted(self, steps: Sequence[Step], most: int, nbytes: Callable[[Step], int]) -> Sequence[Step]:
        """The first steps, within the bytes of one action, but one at least."""
        copied = 0
        for number, step in enumerate(steps[:most]):
            copied += nbytes(step)
            if number and copied > self.settings.action_bytes:
                return steps[:number]
        return steps[:most]

    def _slo_words(self, at_s: float, state: PrecisionState, traffic: RequestStats) -> str:
        """An SLO that is missed though, as long as is remembered, no request had another in its way."""
        missing = missed(traffic, self.slo)
        if not missing or state.alone_since_s is None or at_s - state.alone_since_s < BUCKETS * BUCKET_S:
            return ""
        return f"; {' and '.join(missing)} missed by requests that are alone, which no action would change"


def _settled(state: PrecisionState, snapshot: Snapshot) -> PrecisionState:
    """With what has become of the last action, once that is known, and of what others did."""
    if snapshot.busy:
        return state
    done = still_there(state.done, snapshot.layers)
    if state.before is None:
        return state if done == state.done else replace(state, done=done)
    failures = min(state.failures + 1, MOST_FAILURES) if done == state.before else 0
    return replace(state, done=done, before=None, failures=failures)


def _waits(snapshot: Snapshot) -> int:
    return snapshot.traffic.stalls + snapshot.traffic.preemptions
