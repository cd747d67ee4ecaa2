"""A small model of a server, to try policies on: requests arrive by a trace, the KV cache fills, layers are swapped.

Time goes in ticks. A request takes KV when it is admitted and more with each token; those that do not fit wait, first
come, first served. An action takes effect some ticks after it was asked for.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from elastic.controller.policies.precision_steps import LayerSize
from elastic.controller.snapshot import MemoryStats, RequestStats, Snapshot
from elastic.types import Restore, Swap

TICK_S = 0.1
LAYERS = 24
FULL, PACKED = 50, 14
SIZES = [LayerSize("float32", FULL, {"int4": PACKED})] * LAYERS
BASE = 1000
"""KV capacity with no layer swapped."""
TRACE_TICKS = 600
KINDS = ("steady", "cyclic", "ramp", "spikes")
MEAN_PROMPT, MEAN_OUTPUT = 24, 36
_MEAN_HELD = (MEAN_PROMPT + MEAN_OUTPUT / 2) * MEAN_OUTPUT
"""KV bytes times ticks that a request takes."""


@dataclass(frozen=True)
class Arrival:
    tick: int
    prompt: int
    output: int


def trace(kind: str, seed: int) -> list[Arrival]:
    """Poisson arrivals at a rate that would fill a share of the base capacity, the share as the kind says."""
    choose = random.Random(f"{kind} {seed}")
    load, arrivals = _load(kind, choose), []
    for tick in range(TRACE_TICKS):
        for _ in range(_poisson(choose, load(tick) * BASE / _MEAN_HELD)):
            arrivals.append(
                Arrival(tick, choose.randint(8, 2 * MEAN_PROMPT - 8), choose.randint(8, 2 * MEAN_OUTPUT - 8))
            )
    return arrivals


def _load(kind: str, choose: random.Random) -> Callable[[int], float]:
    """The share of the base capacity that is asked for at each tick."""
    if kind == "steady":
        level = choose.uniform(0.3, 1.2)
        return lambda tick: level
    if kind == "cyclic":
        middle, swing, period = choose.uniform(0.5, 0.9), choose.uniform(0.2, 0.5), choose.uniform(150, 450)
        return lambda tick: middle + swing * math.sin(2 * math.pi * tick / period)
    if kind == "ramp":
        low, high, top = choose.uniform(0.1, 0.4), choose.uniform(0.9, 1.4), choose.uniform(200, 400)
        return lambda tick: (
            low + (high - low) * (tick / top if tick < top else (TRACE_TICKS - tick) / (TRACE_TICKS - top))
        )
    spikes = [(choose.uniform(0, TRACE_TICKS), choose.uniform(10, 100), choose.uniform(0.6, 1.2)) for _ in range(4)]
    return lambda tick: 0.3 + sum(height for start, length, height in spikes if start <= tick < start + length)


def _poisson(choose: random.Random, mean: float) -> int:
    """Knuth's method."""
    limit, product, count = math.exp(-mean), choose.random(), 0
    while product > limit:
        product *= choose.random()
        count += 1
    return count


def demand(arrivals: list[Arrival]) -> list[int]:
    """KV bytes that would be held at each tick if there were room for all at once."""
    held = [0] * TRACE_TICKS
    for one in arrivals:
        for age in range(min(one.output, TRACE_TICKS - one.tick)):
            held[one.tick + age] += one.prompt + age
    return held


@dataclass
class _Running:
    held: int
    left: int


@dataclass
class Plant:
    """Runs a trace, tick by tick."""

    arrivals: list[Arrival]
    choose: random.Random
    now: int = 0
    layers: list[str] = field(default_factory=lambda: ["float32"] * LAYERS)

    def __post_init__(self) -> None:
        self.capacity, self.used = BASE, 0
        self._next = 0
        self._waiting: deque[Arrival] = deque()
        self._running: list[_Running] = []
        self._stalls = self._arrived = self._completed = 0
        self._under_way: tuple[int, tuple[Swap | Restore, ...]] | None = None

    def step(self) -> Snapshot:
        """One tick later."""
        self._complete_the_action()
        while self._next < len(self.arrivals) and self.arrivals[self._next].tick <= self.now:
            self._waiting.append(self.arrivals[self._next])
            self._arrived += 1
            self._next += 1
        self._grow()
        while self._waiting and self.used + self._waiting[0].prompt <= self.capacity:
            one = self._waiting.popleft()
            self._running.append(_Running(one.prompt, one.output))
            self.used += one.prompt
        self.now += 1
        return self._look()

    def act(self, actions: tuple[Swap | Restore, ...]) -> None:
        """Takes effect one to four ticks later."""
        if actions:
            assert self._under_way is None, "the policy acted while an action was under way"
            self._under_way = self.now + self.choose.randint(1, 4), actions

    def _complete_the_action(self) -> None:
        if self._under_way is None or self._under_way[0] > self.now:
            return
        for action in self._under_way[1]:
            target = action.variant if isinstance(action, Swap) else "float32"
            for layer in action.layers:
                if self.layers[layer] != target:
                    gained = FULL - PACKED if target == "int4" else PACKED - FULL
                    if self.used > self.capacity + gained:
                        return  # deferred until there is room
                    self.capacity += gained
                    self.layers[layer] = target
        self._under_way = None

    def _grow(self) -> None:
        """Every running request gets a token, if there is room for it."""
        over = False
        for request in self._running:
            if self.used < self.capacity:
                request.held += 1
                request.left -= 1
                self.used += 1
                over = over or not request.left
            else:
                self._stalls += 1
        if over:
            self._completed += sum(not request.left for request in self._running)
            self._running = [request for request in self._running if request.left]
            self.used = sum(request.held for request in self._running)

    def _look(self) -> Snapshot:
        """With noise in what is measured."""
        seen = min(self.capacity, max(0, round(self.used * self.choose.gauss(1, 0.02))))
        delay = (self.now - self._waiting[0].tick) * TICK_S if self._waiting else 0.0
        traffic = RequestStats(
            waiting=len(self._waiting),
            running=len(self._running),
            queue_delay_s=delay,
            arrived=self._arrived,
            completed=self._completed,
            stalls=self._stalls,
        )
        kv = MemoryStats(seen, self.capacity, self.capacity)
        return Snapshot(self.now * TICK_S, traffic, kv, tuple(self.layers), self._under_way is not None)
