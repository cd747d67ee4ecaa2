"""A host whose ranks share what feeds their cores: caches and the rate of the memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from elastic.sim.core.clock import ScheduledEvent, VirtualClock


class Computer(Protocol):
    """Where a rank computes."""

    shared: bool
    """Whether what others compute meanwhile makes a step take longer."""

    def compute(
        self, seconds: float, done: Callable[[], object], more: float = 0.0, core: object | None = None
    ) -> None:
        """Have something computed that takes so long by itself; by `more` longer beside others than most.

        What is computed on one `core` at a time has it in short turns; None: on one of its own.
        """


@dataclass(frozen=True)
class HostSharing:
    """What ranks of one host, and the process of their fleet, take from each other."""

    contention: float = 0.0
    """How much longer a rank computes for each other one that computes meanwhile,"""
    stages: float = 0.0
    """and by how much more what is computed for steps of several ranks, whose threads share an interpreter."""
    frontend_s: float = 0.0
    """Seconds that the fleet's process computes for each message of a rank,"""
    cores: int = 0
    """on one of so many cores, 2 or more: while ranks compute on all of them, it takes one from these. 0: it has its
    own."""


ALONE = HostSharing()
"""They take nothing from each other."""


class SharedHost:
    """Whoever computes does so at its own rate while others are idle, and slower beside them."""

    def __init__(self, clock: VirtualClock, sharing: HostSharing = ALONE) -> None:
        self.sharing = sharing
        self.shared = sharing.contention > 0 or sharing.stages > 0 or (sharing.frontend_s > 0 and sharing.cores > 0)
        self._clock = clock
        self._tasks: dict[object, list[_Task]] = {}  # by their cores
        self._frontend_left_s = 0.0  # that the fleet's process has to compute
        self._frontend_at_s = 0.0  # until when that is counted
        self._frontend_due: ScheduledEvent | None = None

    def compute(
        self, seconds: float, done: Callable[[], object], more: float = 0.0, core: object | None = None
    ) -> None:
        """Have a rank begin something that takes so long by itself."""
        if not self.shared and core is None:
            self._clock.after(seconds, done)
            return
        task = _Task(seconds, self.sharing.contention + more, done, core or object(), self._clock.now)
        self._advance(task.core)
        self._tasks.setdefault(task.core, []).append(task)
        self._share_out(task.core)

    def take_message(self) -> None:
        """Have the fleet's process take a message of a rank."""
        if self.sharing.frontend_s and self.sharing.cores:
            self._advance()
            self._frontend_left_s += self.sharing.frontend_s
            self._share_out()

    def _end(self, task: _Task) -> None:
        self._advance(task.core)
        beside = self._tasks[task.core]
        beside.remove(task)
        if not beside:
            del self._tasks[task.core]
        self._share_out(task.core)
        task.done()

    def _slowed(self, core: object | None) -> list[_Task]:
        """Return what is slower or faster when something begins or ends on a core."""
        if not self.shared:
            return self._tasks.get(core, [])
        return [task for tasks in self._tasks.values() for task in tasks]

    def _advance(self, core: object | None = None) -> None:
        """Count what was done since somebody began or ended."""
        now = self._clock.now
        for task in self._slowed(core):
            task.left_s = max(0.0, task.left_s - (now - task.at_s) / self._slowdown(task))
            task.at_s = now
        self._frontend_left_s = max(0.0, self._frontend_left_s - (now - self._frontend_at_s))
        self._frontend_at_s = now

    def _share_out(self, core: object | None = None) -> None:
        if self._frontend_due is not None:
            self._frontend_due.cancel()
        self._frontend_due = self._clock.after(self._frontend_left_s, self._go_on) if self._frontend_left_s else None
        for task in self._slowed(core):
            if task.due is not None:
                task.due.cancel()
            task.due = self._clock.after(task.left_s * self._slowdown(task), partial(self._end, task))

    def _go_on(self) -> None:
        """Have all cores be the ranks' again."""
        self._advance()
        self._frontend_left_s = 0.0
        self._share_out()

    def _slowdown(self, task: _Task) -> float:
        busy, cores = len(self._tasks), self.sharing.cores
        slower = (1.0 + task.contention * (busy - 1)) * len(self._tasks[task.core])
        return slower * busy / (cores - 1) if self._frontend_left_s and busy >= cores else slower


@dataclass(eq=False)
class _Task:
    """What one rank computes."""

    left_s: float
    contention: float
    done: Callable[[], object]
    core: object
    at_s: float
    """Until when its progress is counted."""
    due: ScheduledEvent | None = None


class ComputeTurn:
    """A rank, or a device, computes one thing at a time, in the order in which it is asked."""

    shared = True

    def __init__(self, host: Computer, more: float = 0.0) -> None:
        """`more`: by how much longer what is computed takes beside others than most."""
        self.hangs = False
        self._host, self._more = host, more
        self._asked: deque[Callable[[], object]] = deque()
        self._taken = False
        self._wanted: Callable[[], object] | None = None  # told when somebody asks while it is held

    @property
    def idle(self) -> bool:
        """Whether nothing is computed, and nobody waits."""
        return not self._taken and not self._asked and not self.hangs

    def compute(
        self, seconds: float, done: Callable[[], object], more: float = 0.0, core: object | None = None
    ) -> None:
        """Have something computed; one that hangs never does."""
        self.take(lambda: self._host.compute(seconds, partial(self.give_back, done), self._more + more, core or self))

    def take(self, begin: Callable[[], object]) -> None:
        """Have something begin when it is its turn; `give_back` ends that."""
        if not self.hangs:
            self._asked.append(begin)
            if self._wanted is not None:
                self._wanted()
            self._next()

    def hold(self, wanted: Callable[[], object]) -> None:
        """Take it, which is idle, until it is given back; `wanted` is told when somebody asks meanwhile."""
        self._taken, self._wanted = True, wanted

    def give_back(self, done: Callable[[], object] = lambda: None) -> None:
        """Let the next one begin; then tell so."""
        self._taken, self._wanted = False, None
        self._next()
        done()

    def _next(self) -> None:
        if self._asked and not self._taken:
            self._taken = True
            self._asked.popleft()()


@dataclass(eq=False)
class SharedDevices:
    """Several devices that a step needs at the same time: it begins when it is its turn at all of them."""

    clock: VirtualClock
    turns: Sequence[ComputeTurn]
    shared = True

    def compute(
        self, seconds: float, done: Callable[[], object], more: float = 0.0, core: object | None = None
    ) -> None:
        """Have a step computed, which nothing slows down.

        All devices are asked at once, so that no two steps wait for each other.
        """
        begin = Countdown(len(self.turns), lambda: self.clock.after(seconds, partial(self.give_back, done)))
        for turn in self.turns:
            turn.take(begin)

    @property
    def idle(self) -> bool:
        """Whether nothing is computed at any of them, and nobody waits."""
        return all(turn.idle for turn in self.turns)

    def hold(self, wanted: Callable[[], object]) -> None:
        """Take all of them, which are idle, until they are given back; `wanted` is told when somebody asks."""
        for turn in self.turns:
            turn.hold(wanted)

    def give_back(self, done: Callable[[], object] = lambda: None) -> None:
        """Let the next ones begin; then tell so."""
        for turn in self.turns:
            turn.give_back()
        done()


@dataclass(eq=False)
class Countdown:
    """Calls something when it was called so many times."""

    left: int
    done: Callable[[], object]

    def __call__(self) -> None:
        """Count."""
        self.left -= 1
        if not self.left:
            self.done()
