"""The state of an engine during a replay, sampled, and the actions that were done meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class EngineState:
    """The state of an engine at one moment. `t_s`: seconds since the replay began; None: not known."""

    t_s: float
    waiting: int
    running: int
    kv_used_bytes: int | None = None
    kv_capacity_bytes: int | None = None
    layers: dict[str, int] = field(default_factory=dict)
    """Variant -> number of decoder layers in it."""
    preemptions: int = 0
    """The count since the engine began."""
    stalls: int = 0
    token_layers: dict[str, int] | None = None
    """Variant -> pairs of a generated token and a decoder layer in it, since a server began; None for an engine."""


@dataclass(frozen=True)
class FinishedAction:
    """One action, as it happened. `t_s`: the time of its commit, in seconds since the replay began."""

    t_s: float
    kind: str
    """A name such as "release", "swap", "restore" or "resize_kv"."""
    reason: str
    layers: tuple[int, ...]
    variant: str | None
    bytes: int
    """The bytes that were copied."""
    released_bytes: int
    """The bytes by which the KV cache's capacity grew."""
    prepare_ms: float
    wait_ms: float
    pause_ms: float
    ok: bool
    outcome: str


ActionKey = tuple[str, int]
"""Who did an action, such as a rank of a fleet, "" where there is one, and its number there."""


@dataclass(frozen=True)
class Observation:
    """What a target says of itself at one moment."""

    state: EngineState | None
    """None: it cannot be known."""
    actions: Mapping[ActionKey, FinishedAction]
    """The last finished ones; `t_s` in seconds since the epoch."""
    weights: tuple[tuple[str, ...], ...] = ()
    """The forms of `Engine.weights`; empty where they are not known."""


class StateSampler:
    """A thread that observes at intervals, and keeps the states and all actions since it was made.

    `observe` is called with the time of the replay. Where it told of no state at first, actions count by their times.
    """

    def __init__(self, observe: Callable[[float], Observation], every_s: float) -> None:
        self._observe = observe
        self._every_s = every_s
        self._actions: dict[ActionKey, FinishedAction] = {}
        self._first = self._last = observe(0.0)
        self._states = [] if self._first.state is None else [self._first.state]
        self._start_s = self._wall_s = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_stopped, name="elastic-bench-sampler", daemon=True)

    @contextmanager
    def running(self, start_s: float) -> Iterator[None]:
        """Observe meanwhile; `start_s` is the replay's zero, in seconds of `time.perf_counter`."""
        self._start_s = start_s
        self._wall_s = time.time() - (time.perf_counter() - start_s)
        self._thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            self._thread.join()

    def result(self) -> tuple[tuple[EngineState, ...], tuple[FinishedAction, ...], tuple[tuple[str, ...], ...]]:
        """Take a last sample; return all states and actions, and the forms of the weights."""
        self._sample()
        on_our_clock = {key: replace(each, t_s=each.t_s - self._wall_s) for key, each in self._actions.items()}
        if self._first.state is None:
            old = {key for key, action in on_our_clock.items() if action.t_s < 0}
        else:
            old = set(self._first.actions)
        actions = sorted((action.t_s, key, action) for key, action in on_our_clock.items() if key not in old)
        return tuple(self._states), tuple(action for *_, action in actions), self._last.weights

    def _sample_until_stopped(self) -> None:
        while not self._stopped.is_set():
            self._sample()
            self._stopped.wait(self._every_s)

    def _sample(self) -> None:
        self._last = self._observe(time.perf_counter() - self._start_s)
        if self._last.state is not None:
            self._states.append(self._last.state)
        self._actions |= self._last.actions
