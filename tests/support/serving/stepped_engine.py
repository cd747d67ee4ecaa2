"""An engine without a model or a thread, for tests of a rank: it computes when the test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from elastic.controller.sensors.request_metrics import RequestMetrics
from elastic.engines.base import Listener, Output
from elastic.engines.core.kv_state import KVFormat, KVReport
from elastic.engines.core.load import EngineLoad
from elastic.engines.core.step import SequenceState
from elastic.errors import StateError

FORMAT = KVFormat(32, "head_centric", "float32", 2, 8, (((0, 1), None),))


class SteppedEngine:
    """What a rank needs of a `ContinuousEngine`. The k-th token of an answer is k; `step` tells the next of each."""

    kv_format = FORMAT
    sector_blocks, shares_prefixes = (1,), True

    def __init__(self, refuse: Exception | None = None) -> None:
        self.counters = RequestMetrics()
        self.runtime: Any = SlowRuntime()
        self.weights: tuple[tuple[str, ...], ...] = (("float32",),)
        self.reports = self.moves = self
        self.on_step: Callable[[KVReport], None] | None = None
        self.on_room: Callable[[], object] | None = None
        self.serving = False
        self.refuse = refuse
        self.live: dict[tuple[str, int], tuple[SequenceState, Listener, list[int]]] = {}
        self.cancelled: list[tuple[str, int | None]] = []
        self.asked: list[str] = []
        self.steps = 0
        self.changed = threading.Condition()

    def start(self) -> None:
        self.serving = True

    def adopt(self, states: Sequence[SequenceState], listener: Listener, **_: Any) -> int:
        with self.changed:
            if self.refuse is not None:
                raise self.refuse
            for state in states:
                self.live[state.request.id, state.index] = (state, listener, list(state.generated))
            self.changed.notify_all()
        return 0

    def cancel(self, request: str, index: int | None = None) -> None:
        with self.changed:
            self.cancelled.append((request, index))
            self.changed.notify_all()

    def step(self) -> None:
        """Tell one more token of every answer, then the step's report."""
        self.steps += 1
        for (request, index), (state, listener, tokens) in list(self.live.items()):
            tokens.append(len(tokens))
            ends = len(tokens) == state.request.max_tokens
            if ends:
                del self.live[request, index]
            listener(Output(request, (tokens[-1],), "length" if ends else None, index=index))
        assert self.on_step is not None
        self.on_step(KVReport(ended=(f"step {self.steps}",)))

    def stop(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        self.serving = False
        while self.live and drain:
            self.step()
        for (request, index), (_, listener, _) in list(self.live.items()):
            del self.live[request, index]
            listener(Output(request, (), "cancelled", index=index))
        with self.changed:
            self.changed.notify_all()

    def wait(self, what: Callable[[], object]) -> None:
        with self.changed:
            assert self.changed.wait_for(what, timeout=60)

    def load(self) -> EngineLoad:
        return EngineLoad(len(self.live), 0, 5, 10, self.steps)

    def kv_source(self) -> None:
        return None

    def locate(self, request: str) -> tuple[Any, ...]:
        self.asked.append(request)
        return ()

    def hand_over(self, request: str) -> None:
        raise StateError(f"{request} cannot be handed over")

    def release(self, request: str) -> None:
        raise ZeroDivisionError("a fault of our own")

    def check(self) -> None:
        self.asked.append("check")


class SlowRuntime:
    """Its actions last until the test says so."""

    pools = ()

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def apply(self, actions: Sequence[Any], *, why: str) -> tuple[Any, ...]:
        self.begun.set()
        assert self.may_end.wait(60)
        return ("applied", why, *actions)

    def plan(self, actions: Sequence[Any], *, dry_run: bool) -> tuple[Any, ...]:
        return (threading.Lock(),)  # which cannot be sent

    def check(self) -> None:
        pass
