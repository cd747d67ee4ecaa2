"""The state of an engine during a replay, sampled, and the actions that were done meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
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


class StateSampler:
    """A thread that samples at intervals, and keeps the states and all actions since it was made.

    `observe` returns the state at a time, None if it is not known; `actions` returns the last actions by their numbers,
    with `t_s` in seconds since the epoch.
    """

    def __init__(
        self,
        observe: Callable[[float], EngineState | None],
        actions: Callable[[], Mapping[int, FinishedAction]],
        every_s: float,
    ) -> None:
        self._observe = observe
        self._list_actions = actions
        self._every_s = every_s
        self._states: list[EngineState] = []
        self._actions: dict[int, FinishedAction] = {}
        self._old = set(actions())
        self._start_s = self._wall_s = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_stopped, name="elastic-bench-sampler", daemon=True)

    def start(self, start_s: float) -> None:
        """Begin; `start_s` is the replay's zero, in seconds of `time.perf_counter`."""
        self._start_s = start_s
        self._wall_s = time.time() - (time.perf_counter() - start_s)
        self._thread.start()

    def stop(self) -> tuple[tuple[EngineState, ...], tuple[FinishedAction, ...]]:
        """End with a last sample; return all states and actions."""
        self._stopped.set()
        self._thread.join()
        self._sample()
        actions = [self._actions[number] for number in sorted(self._actions)]
        return tuple(self._states), tuple(replace(a, t_s=a.t_s - self._wall_s) for a in actions)

    def _sample_until_stopped(self) -> None:
        while not self._stopped.is_set():
            self._sample()
            self._stopped.wait(self._every_s)

    def _sample(self) -> None:
        state = self._observe(time.perf_counter() - self._start_s)
        if state is not None:
            self._states.append(state)
        self._actions |= {n: action for n, action in self._list_actions().items() if n not in self._old}
