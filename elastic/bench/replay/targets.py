"""Targets of a replay: an engine in this process, or (`http_target`) a server."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from elastic.bench.replay.recorder import Recorder
from elastic.bench.replay.timeline import EngineState, FinishedAction
from elastic.engines.base import Engine, Request
from elastic.errors import CapacityError, ElasticError, Overloaded
from elastic.types import DROPPED, HOST, KINDS, Drop, Event, Release, ResizeKV, Swap

_FORM_AFTER: Mapping[type, str] = {Release: "absent", Drop: DROPPED}


@runtime_checkable
class LoadTarget(Protocol):
    """Anything that serves the requests of a replay. Thread-safe."""

    @property
    def weights(self) -> tuple[tuple[str, ...], ...]:
        """The forms of `Engine.weights`; empty where they are not known."""

    def submit(self, request: Request, recorder: Recorder) -> None:
        """Hand a request in and return at once; its tokens and its end, a refusal too, go to the recorder."""

    def cancel(self, request: str) -> None:
        """Stop a request that nobody waits for any more."""

    def observe(self, t_s: float) -> EngineState | None:
        """Return the present state, if it can be known; `t_s` is the time of the replay."""

    def actions(self) -> Mapping[int, FinishedAction]:
        """Return the last finished actions by their numbers; `t_s` in seconds since the epoch."""


class InProcessTarget:
    """An engine in this process, which somebody else starts and stops."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def weights(self) -> tuple[tuple[str, ...], ...]:
        """The forms that the engine's model has had."""
        return self._engine.weights

    def submit(self, request: Request, recorder: Recorder) -> None:
        """Submit a request to the engine; a refusal is recorded, not raised."""
        try:
            self._engine.submit(request, recorder.hear)
        except (Overloaded, CapacityError) as error:
            recorder.end("rejected", time.perf_counter(), str(error))
        except ElasticError as error:
            recorder.end("failed", time.perf_counter(), str(error))

    def cancel(self, request: str) -> None:
        """Cancel a request of the engine."""
        self._engine.cancel(request)

    def observe(self, t_s: float) -> EngineState | None:
        """Return the present state of the engine and its runtime."""
        traffic = self._engine.counters.read()
        runtime = self._engine.runtime
        if runtime is None:
            weights = self._engine.weights
            layers = Counter(weights[-1] if weights else ())
        else:
            variants = (
                [DROPPED if r.place == DROPPED else r.variant for r in copies if r.place != HOST]
                for copies in runtime.status().residencies.values()
            )
            layers = Counter(forms[0] if forms else "absent" for forms in variants)
        return EngineState(
            t_s,
            traffic.waiting,
            traffic.running,
            runtime.kv.used_bytes if runtime else None,
            runtime.kv.capacity_bytes if runtime else None,
            dict(layers),
            traffic.preemptions,
            traffic.stalls,
        )

    def actions(self) -> Mapping[int, FinishedAction]:
        """Return the runtime's last events by their numbers; `t_s` in seconds since the epoch."""
        runtime = self._engine.runtime
        return {event.id: _finished(event) for event in runtime.events()} if runtime else {}


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
