"""A host whose ranks share what feeds their cores: caches and the rate of the memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from elastic.sim.core.clock import ScheduledEvent, VirtualClock


class SharedHost:
    """Whoever computes does so at its own rate while others are idle, and slower beside them."""

    def __init__(self, clock: VirtualClock, contention: float = 0.0) -> None:
        """`contention`: how much longer something takes for each other rank that computes meanwhile; 0: nothing is
        shared."""
        self.contention = contention
        self._clock = clock
        self._tasks: list[_Task] = []
        self._at_s = 0.0  # until when their progress is counted

    def compute(self, seconds: float, done: Callable[[], object]) -> None:
        """Have a rank begin something that takes so long by itself."""
        if not self.contention:
            self._clock.after(seconds, done)
            return
        self._advance()
        self._tasks.append(_Task(seconds, done))
        self._share_out()

    def _end(self, task: _Task) -> None:
        self._advance()
        self._tasks.remove(task)
        self._share_out()
        task.done()

    def _advance(self) -> None:
        """Count what was done since somebody began or ended."""
        seconds, self._at_s = self._clock.now - self._at_s, self._clock.now
        for task in self._tasks:
            task.left_s = max(0.0, task.left_s - seconds / self._slowdown)

    def _share_out(self) -> None:
        for task in self._tasks:
            if task.due is not None:
                task.due.cancel()
            task.due = self._clock.after(task.left_s * self._slowdown, partial(self._end, task))

    @property
    def _slowdown(self) -> float:
        return 1.0 + self.contention * (len(self._tasks) - 1)


class _Task:
    """What one rank computes."""

    def __init__(self, left_s: float, done: Callable[[], object]) -> None:
        self.left_s, self.done = left_s, done
        self.due: ScheduledEvent | None = None
