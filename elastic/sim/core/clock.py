"""Simulated time: events in the order in which they are due."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from elastic.errors import StateError


@dataclass(eq=False, slots=True)
class ScheduledEvent:
    """Something that is due; `cancel` it, and it does not happen."""

    action: Callable[[], object] | None

    def cancel(self) -> None:
        """Have it not happen. Can be called twice, and when it has happened."""
        self.action = None


class VirtualClock:
    """Seconds that go on from event to event. Events that are due at the same time happen in the order they were made.

    Called, it says what time it is, as `time.perf_counter` does.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        """How many have happened."""
        self._heap: list[tuple[float, int, ScheduledEvent]] = []
        self._made = 0

    def __call__(self) -> float:
        return self.now

    def at(self, at_s: float, action: Callable[[], object]) -> ScheduledEvent:
        """Have something happen at a time. Raises `StateError` for one that is over."""
        if not at_s >= self.now:
            raise StateError(f"an event at {at_s} s cannot be made at {self.now} s; make it for later")
        event = ScheduledEvent(action)
        heapq.heappush(self._heap, (at_s, self._made, event))
        self._made += 1
        return event

    def after(self, seconds: float, action: Callable[[], object]) -> ScheduledEvent:
        """Have something happen in so many seconds."""
        return self.at(self.now + seconds, action)

    def run(self, until_s: float = math.inf) -> None:
        """Have all happen that is due until then, and what comes of it; it is then so late, or as late as the last."""
        while self._heap and self._heap[0][0] <= until_s:
            at_s, _, event = heapq.heappop(self._heap)
            if event.action is not None:
                self.now = at_s
                self.events += 1
                action, event.action = event.action, None
                action()
        if until_s < math.inf:
            self.now = max(self.now, until_s)


def random_stream(seed: int, name: str) -> random.Random:
    """Return random numbers of their own for something, so that others that draw more or less do not change them."""
    return random.Random(f"{name} {seed}")
