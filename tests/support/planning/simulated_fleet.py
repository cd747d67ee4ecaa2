"""A small model of a fleet, to try policies on: requests wait at their instance or at the fleet, and KV fills.

Time goes in ticks. Requests stay where they were sent to; a group's KV is that of its instances and of what they have
dropped. Actions take effect some ticks after they were asked for; a restore waits until there is room.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from elastic.controller.fleet_snapshot import FleetSnapshot, GroupReading, MemberReading
from elastic.controller.policies.overload import OverloadPlan
from elastic.planning.arrangement.stages import Held
from support.planning.simulated_server import BASE, TICK_S, Arrival

LAYERS = 12
LAYER_BYTES = 60
ALL = frozenset(range(LAYERS))


@dataclass
class _Running:
    home: str
    held: int
    most: int
    left: int


class _Group:
    def __init__(self, layers: dict[str, frozenset[int]]) -> None:
        self.layers = layers
        self.waiting: deque[tuple[int, Arrival, str]] = deque()
        self.running: list[_Running] = []
        self.busy_until = -1
        self.used = self.wanted = 0
        self.homes = dict.fromkeys(layers, 0)
        dropped = sum(LAYERS - len(held) for held in layers.values())
        self.capacity = BASE * len(layers) + LAYER_BYTES * dropped

    @property
    def committed(self) -> int:
        return sum(self.homes.values())

    def wait(self, entry: tuple[int, Arrival, str]) -> None:
        self.waiting.append(entry)
        self.wanted += _most(entry[1])

    def run(self, request: _Running) -> None:
        self.running.append(request)
        self.used += request.held
        self.homes[request.home] += request.most

    def grow(self) -> None:
        self.used += len(self.running)
        over = False
        for request in self.running:
            request.held += 1
            request.left -= 1
            if not request.left:
                over = True
                self.used -= request.held
                self.homes[request.home] -= request.most
        if over:
            self.running = [request for request in self.running if request.left]

    def admit(self, one: Arrival, home: str) -> bool:
        if self.committed + _most(one) > self.capacity:
            return False
        self.run(_Running(home, one.prompt, _most(one), one.output))
        return True


def _most(one: Arrival) -> int:
    return one.prompt + one.output


class SimulatedFleet:
    """Instances `i0`, `i1`, ...; admission is by what a request may come to need."""

    def __init__(self, instances: int, choose: random.Random, *, queue_at_fleet: bool = False) -> None:
        self.groups = [_Group({f"i{number}": ALL}) for number in range(instances)]
        self.now = 0
        self.queue: deque[tuple[int, Arrival]] = deque()
        self.at_fleet = queue_at_fleet
        self._choose = choose
        self._queued = 0
        self._pending: list[tuple[int, list[_Group], list[_Group]]] = []

    def step(self, arrivals: Sequence[tuple[str, Arrival]]) -> FleetSnapshot:
        """One tick later; arrivals name their instance, unless they queue at the fleet."""
        self._finish_actions()
        for home, one in arrivals:
            if self.at_fleet:
                self.queue.append((self.now, one))
                self._queued += _most(one)
            else:
                self._of(home).wait((self.now, one, home))
        for group in self.groups:
            group.grow()
            while group.waiting and group.admit(*group.waiting[0][1:]):
                group.wanted -= _most(group.waiting.popleft()[1])
        while self.queue:
            roomiest = min(self.groups, key=lambda group: group.committed / group.capacity)
            if not roomiest.admit(self.queue[0][1], min(roomiest.homes, key=roomiest.homes.__getitem__)):
                break
            self._queued -= _most(self.queue.popleft()[1])
        self.now += 1
        return self._look()

    def act(self, plan: OverloadPlan) -> None:
        """Takes effect one to four ticks later; all that is asked for is possible."""
        number_of = {group: number for number, group in enumerate(map(id, self.groups))}
        asked: set[int] = set()
        for drop in plan.drops:
            merged = [self.groups[number] for number in drop.groups]
            assert {name for group in merged for name in group.layers} == set(drop.members)
            after = _Group(dict(zip(drop.members, map(frozenset, drop.keeps), strict=True)))
            assert frozenset().union(*after.layers.values()) == ALL
            self._begin(merged, [after])
            asked |= {number_of[id(group)] for group in merged}
        for names in plan.restores:
            group = next(group for group in self.groups if tuple(group.layers) == names)
            self._begin([group], [_Group({name: ALL}) for name in names])
            asked.add(number_of[id(group)])
        assert len(asked) == sum(len(drop.groups) for drop in plan.drops) + len(plan.restores), "a group acts twice"

    def _begin(self, before: list[_Group], after: list[_Group]) -> None:
        done = self.now + self._choose.randint(1, 4)
        assert all(group.busy_until < self.now for group in before), "it acted while an action was under way"
        for group in before:
            group.busy_until = 1 << 30
        self._pending.append((done, before, after))

    def _finish_actions(self) -> None:
        waiting = []
        for done, before, after in self._pending:
            committed = sum(group.committed for group in before)
            if done > self.now or committed > sum(group.capacity for group in after):
                waiting.append((done, before, after))
                continue
            homes = {name: group for group in after for name in group.layers}
            for old in before:
                for request in old.running:
                    homes[request.home].run(request)
                for entry in old.waiting:
                    homes[entry[2]].wait(entry)
                self.groups.remove(old)
            self.groups.extend(after)
        self._pending = waiting

    def _of(self, home: str) -> _Group:
        return next(group for group in self.groups if home in group.layers)

    def _look(self) -> FleetSnapshot:
        return FleetSnapshot(
            self.now * TICK_S,
            tuple(map(self._reading, self.groups)),
            (LAYER_BYTES,) * LAYERS,
            queued_bytes=self._queued,
            queue_s=(self.now - self.queue[0][0]) * TICK_S if self.queue else 0.0,
        )

    def _reading(self, group: _Group) -> GroupReading:
        """With noise in what is used."""
        noisy = max(0, round(group.used * self._choose.gauss(1, 0.02)))
        members = tuple(
            MemberReading(Held(name, layers), BASE, group.homes[name]) for name, layers in group.layers.items()
        )
        return GroupReading(
            members,
            group.capacity,
            noisy,
            group.committed - group.used,
            group.wanted,
            (self.now - group.waiting[0][0]) * TICK_S if group.waiting else 0.0,
            len(group.running),
            group.busy_until >= self.now,
        )
