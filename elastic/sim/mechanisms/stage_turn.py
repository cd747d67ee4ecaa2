"""What a simulated rank does with its time while it computes layers of several instances."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from elastic.engines.pipeline.turn import StageTimes
from elastic.sim.core.clock import VirtualClock
from elastic.sim.core.host import Computer, ComputeTurn


class StageTurn(ComputeTurn):
    """A turn that counts as the real `Turn` does: when it is taken, and when it is not while steps are in flight."""

    def __init__(self, host: Computer, clock: VirtualClock, more: float = 0.0) -> None:
        """`more`: see `ComputeTurn`."""
        super().__init__(host, more)
        self._clock = clock
        self._expected = 0  # steps in flight that have a part here
        self._own = 0  # steps that its rank's engine works on
        self._behind: list[Callable[[], object]] = []  # that asked for the turn meanwhile
        self._busy_s = self._bubble_s = self._counted_s = 0.0

    @property
    def times(self) -> StageTimes:
        """What was done until now; only its seconds of computing, and of bubbles."""
        self._count()
        return StageTimes(self._busy_s, self._bubble_s)

    def expect(self, steps: int) -> None:
        """Have so many more steps be in flight that have a part here; they are fewer below 0."""
        self._count()
        self._expected += steps

    @property
    def idle(self) -> bool:
        """See `ComputeTurn`."""
        return super().idle and not self._behind

    def exchange(self, seconds: float, done: Callable[[], object]) -> None:
        """Have its rank send and receive beside its turn: at once, on the core of whoever has the turn."""
        if not self.hangs:
            self._host.compute(seconds, done, self._more, self)

    def work_beside(self, seconds: float, done: Callable[[], object]) -> None:
        """Have its rank's engine work on a step beside its turn, on the same core; that step waits for nobody then.

        It begins at once, also while others compute. Who asks for the turn meanwhile has it behind that: in a real rank
        it would not come to the interpreter.
        """
        if not self.hangs:
            self._count()
            self._own += 1
            self._host.compute(seconds, partial(self._end_work, done), self._more, self)

    def take(self, begin: Callable[[], object]) -> None:
        """See `ComputeTurn`."""
        self._count()
        if self._own:
            self._behind.append(begin)
        else:
            super().take(begin)

    def give_back(self, done: Callable[[], object] = lambda: None) -> None:
        """See `ComputeTurn`."""
        self._count()
        super().give_back(done)

    def _count(self) -> None:
        """Count the time since something changed last."""
        past_s, self._counted_s = self._clock.now - self._counted_s, self._clock.now
        if self._taken:
            self._busy_s += past_s
        elif self._expected > self._own:
            self._bubble_s += past_s

    def _end_work(self, done: Callable[[], object]) -> None:
        self._count()
        self._own -= 1
        behind, self._behind = (self._behind, []) if not self._own else ([], self._behind)
        for begin in behind:
            super().take(begin)
        done()
