"""Where requests are sent: an engine in this process, or (`http_target.py`) a server."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from elastic.bench.replay.recorder import Recorder
from elastic.bench.replay.timeline import EngineState, FinishedRequest, ObservedState, done, observe
from elastic.engines.base import Engine, Request
from elastic.errors import CapacityError, ElasticError, Overloaded


@runtime_checkable
class LoadTarget(ObservedState, Protocol):
    """What a replay needs of whatever serves. Thread-safe."""

    @property
    def weights(self) -> tuple[tuple[str, ...], ...]:
        """As of an engine; empty where it is not known."""
        ...

    def submit(self, request: Request, recorder: Recorder) -> None:
        """Hand a request in, and return at once; all that comes of it, a refusal too, goes to the recorder."""
        ...

    def cancel(self, request: str) -> None:
        """Nobody waits for it any more."""
        ...


class InProcessTarget:
    """An engine in this process, which somebody else starts and stops."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def weights(self) -> tuple[tuple[str, ...], ...]:
        return self._engine.weights

    def submit(self, request: Request, recorder: Recorder) -> None:
        try:
            self._engine.submit(request, recorder.hear)
        except (Overloaded, CapacityError) as error:
            recorder.end("rejected", time.perf_counter(), str(error))
        except ElasticError as error:
            recorder.end("failed", time.perf_counter(), str(error))

    def cancel(self, request: str) -> None:
        self._engine.cancel(request)

    def observe(self, t_s: float) -> EngineState | None:
        return observe(self._engine, t_s)

    def actions(self) -> Mapping[int, FinishedRequest]:
        runtime = self._engine.runtime
        return {event.id: done(event) for event in runtime.events()} if runtime else {}
