"""Targets of a replay: an engine in this process, or (`http_target`) a server."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from elastic.bench.replay.recorder import Recorder
from elastic.bench.replay.timeline import EngineState, FinishedAction, Observation
from elastic.engines.base import Engine, Request
from elastic.errors import CapacityError, ElasticError, Overloaded
from elastic.types import DROPPED, HOST, KINDS, Drop, Event, Release, ResizeKV, Swap

_FORM_AFTER: Mapping[type, str] = {Release: "absent", Drop: DROPPED}


@runtime_checkable
class LoadTarget(Protocol):
    """Anything that serves the requests of a replay. Thread-safe."""

    def submit(self, request: Request, recorder: Recorder) -> None:
        """Hand a request in and return at once; its tokens and its end, a refusal too, go to the recorder."""

    def cancel(self, request: str) -> None:
        """Stop a request that nobody waits for any more."""

    def observe(self, t_s: float) -> Observation:
        """Return the present state and the last actions, as far as they can be known; `t_s`: the replay's time."""


@dataclass(frozen=True)
class InProcessTarget:
    """An engine in this process, which somebody else starts and stops."""

    engine: Engine

    def submit(self, request: Request, recorder: Recorder) -> None:
        """Submit a request to the engine; a refusal is recorded, not raised."""
        try:
            self.engine.submit(request, recorder.hear)
        except (Overloaded, CapacityError) as error:
            recorder.end("rejected", time.perf_counter(), str(error))
        except ElasticError as error:
            recorder.end("failed", time.perf_counter(), str(error))

    def cancel(self, request: str) -> None:
        """Cancel a request of the engine."""
        self.engine.cancel(request)

    def observe(self, t_s: float) -> Observation:
        """Return the present state of the engine and its runtime, and the runtime's last events."""
        traffic, runtime, weights = self.engine.counters.read(), self.engine.runtime, self.engine.weights
        if runtime is None:
            layers = Counter(weights[-1] if weights else ())
        else:
            variants = (
                [DROPPED if r.place == DROPPED else r.variant for r in copies if r.place != HOST]
                for copies in runtime.status().residencies.values()
            )
            layers = Counter(forms[0] if forms else "absent" for forms in variants)
        state = EngineState(
            t_s,
            traffic.waiting,
            traffic.running,
            runtime.kv.used_bytes if runtime else None,
            runtime.kv.capacity_bytes if runtime else None,
            dict(layers),
            traffic.preemptions,
            traffic.stalls,
        )
        events = runtime.events() if runtime else ()
        return Observation(state, {("", event.id): _finished(event) for event in events}, weights)


def _finished(event: Event) -> FinishedAction:
    action = event.action
    return FinishedAction(
        event.when_s,
        KINDS[type(action)],
        event.why,
        () if isinstance(action, ResizeKV) else action.layers,
        action.variant if isinstance(action, Swap) else _FORM_AFTER.get(type(action)),
        event.moved_bytes,
        event.released_bytes,
        event.prepare_ms,
        event.wait_ms,
        event.pause_ms,
        event.ok,
        event.outcome,
    )
