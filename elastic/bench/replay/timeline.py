"""What the engine looked like while it was replayed to: sampled states, and the actions that were done."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from elastic.engines.base import Engine
from elastic.runtime.runtime import Runtime
from elastic.types import HOST, KINDS, Event, Release, ResizeKV, Swap


@dataclass(frozen=True)
class EngineState:
    """One moment. `t_s`: seconds since the replay began; None: not known."""

    t_s: float
    waiting: int
    running: int
    kv_used_bytes: int | None = None
    kv_capacity_bytes: int | None = None
    layers: dict[str, int] = field(default_factory=dict)
    """Variant -> how many decoder layers are in it."""
    preemptions: int = 0
    """Since the engine began."""
    stalls: int = 0
    token_layers: dict[str, int] | None = None
    """Of a server, since it began: variant -> pairs of a generated token and a decoder layer that was in it."""


@dataclass(frozen=True)
class FinishedRequest:
    """One action, as it happened. `t_s`: when it was committed, in seconds since the replay began."""

    t_s: float
    kind: str
    """release, swap, restore or resize_kv."""
    reason: str
    layers: tuple[int, ...]
    variant: str | None
    bytes: int
    """Copied."""
    released_bytes: int
    """What the KV cache could count on more than before."""
    prepare_ms: float
    wait_ms: float
    pause_ms: float
    ok: bool
    outcome: str


def done(event: Event) -> FinishedRequest:
    """An event of a runtime; `t_s` in seconds since the epoch, still."""
    action = event.action
    return FinishedRequest(
        event.when_s,
        KINDS[type(action)],
        event.why,
        () if isinstance(action, ResizeKV) else action.layers,
        action.variant if isinstance(action, Swap) else "absent" if isinstance(action, Release) else None,
        event.moved_bytes,
        event.released_bytes,
        event.prepare_ms,
        event.wait_ms,
        event.pause_ms,
        event.ok,
        event.outcome,
    )


def observe(engine: Engine, t_s: float) -> EngineState:
    """The state of an engine in this process."""
    traffic = engine.counters.read()
    runtime = engine.runtime
    return EngineState(
        t_s,
        traffic.waiting,
        traffic.running,
        runtime.kv.used_bytes if runtime else None,
        runtime.kv.capacity_bytes if runtime else None,
        layers_by_variant(runtime) if runtime else dict(Counter(engine.weights[-1] if engine.weights else ())),
        traffic.preemptions,
        traffic.stalls,
    )


def layers_by_variant(runtime: Runtime) -> dict[str, int]:
    """How many decoder layers are in each variant; `absent`: in host memory only."""
    here = ([r.variant for r in found if r.place != HOST] for found in runtime.status().residencies.values())
    return dict(Counter(variants[0] if variants else "absent" for variants in here))


class ObservedState(Protocol):
    """What can be looked at."""

    def observe(self, t_s: float) -> EngineState | None:
        """Its state now, if it can be known."""
        ...

    def actions(self) -> Mapping[int, FinishedRequest]:
        """By their numbers, the last ones that were done; `t_s` in seconds since the epoch."""
        ...


class StateSampler:
    """A thread that looks every so often, and keeps what it saw: states, and all actions since it was made."""

    def __init__(self, observed: ObservedState, every_s: float) -> None:
        self._observed = observed
        self._every_s = every_s
        self._states: list[EngineState] = []
        self._actions: dict[int, FinishedRequest] = {}
        self._old = set(observed.actions())
        self._start_s = self._wall_s = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic-bench-sampler", daemon=True)

    def start(self, start_s: float) -> None:
        """Begin; `start_s` is the replay's zero, in seconds of `time.perf_counter`."""
        self._start_s = start_s
        self._wall_s = time.time() - (time.perf_counter() - start_s)
        self._thread.start()

    def stop(self) -> tuple[tuple[EngineState, ...], tuple[FinishedRequest, ...]]:
        """End with a last look; returns all that was seen."""
        self._stopped.set()
        self._thread.join()
        self._sample()
        actions = [self._actions[number] for number in sorted(self._actions)]
        return tuple(self._states), tuple(replace(a, t_s=a.t_s - self._wall_s) for a in actions)

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._sample()
            self._stopped.wait(self._every_s)

    def _sample(self) -> None:
        state = self._observed.observe(time.perf_counter() - self._start_s)
        if state is not None:
            self._states.append(state)
        self._actions |= {n: action for n, action in self._observed.actions().items() if n not in self._old}
