"""What the policy of lengths reads follows what changed: it decides as by a look at every request of the fleet."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic import CapacityError, Overloaded, clock
from elastic.cluster.fleet.lengths import readings
from elastic.config import Lengths
from elastic.controller.policies.lengths.policy import LengthPlan
from elastic.controller.policies.lengths.snapshot import LengthSnapshot
from unit.cluster.fleet.lengths.test_controller import World

SETTINGS = Lengths(wait_s=0.0, dwell_s=0.4, cooldown_s=0.3, patience_s=0.6, most_ranks=4)


def full_snapshot(world: World) -> LengthSnapshot:
    """Read every request of every instance."""
    dispatcher, capacity = world.dispatcher, world.controller._capacity
    serving = {i.name: i for i in dispatcher.instances.values() if i.state == "serving"}
    usual, any_of = dispatcher.answer_lengths.usual(), next(iter(serving.values()))
    units = readings._units(world.verbs.groups(), serving)
    instances = tuple(
        readings._reading([serving[name] for name in unit.ranks], unit, capacity, usual, frozenset()) for unit in units
    )
    waiting = tuple(
        readings.WaitingRequest(record.request.id, readings._kv(any_of, record), record.arrived_s)
        for record in dispatcher.queue
    )
    return LengthSnapshot(clock.now(), instances, waiting)


class Histories:
    """What happens to a world, at random; a twin of its policy decides by full snapshots."""

    def __init__(self, world: World, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world, self.choose, self.now = world, random.Random(seed), 100.0
        self.asked = 0
        self.decided: Counter[str] = Counter()
        monkeypatch.setattr(clock, "now", lambda: self.now)

    def happen(self) -> None:
        self.choose.choices([self.ask, self.step, self.tick, self.limit], [3, 24, 12, 1])[0]()
        self.now += self.choose.choice([0.0, 0.05, 0.2])

    def ask(self) -> None:
        self.asked += 1
        with suppress(CapacityError, Overloaded):
            self.world.ask(self.choose.choice([2, 2, 3, 3, 5, 8, 12, 14]), f"request-{self.asked}")

    def step(self) -> None:
        self.choose.choice(list(self.world.launcher.ranks.values())).step()

    def limit(self) -> None:
        alone = set(self.world.launcher.ranks).difference(*self.world.verbs.units)
        if alone:
            self.world.verbs.give(self.choose.choice(sorted(alone)), self.choose.choice([6, 10]))

    def tick(self) -> None:
        controller = self.world.controller
        controller._measure()
        state = controller._state
        expected = controller._policy.decide(full_snapshot(self.world), state)
        plan = controller.tick()
        assert plan is not None
        assert decisions(plan) == decisions(expected)
        for change in (*plan.ups, *plan.downs):
            controller.change(change)
            self.decided[type(change).__name__] += 1
        self.decided["routes"] += len(plan.routes)
        controller._changing = ()


def decisions(plan: LengthPlan) -> tuple[object, ...]:
    """Return all that is decided, and what is remembered of instances and requests."""
    state = plan.state
    remembered = state.large, dict(state.targets), state.parted_s, state.regrets
    return plan.routes, plan.ups, plan.downs, plan.closed, plan.refused, plan.reason, remembered


def live_through(seed: int, events: int) -> Counter[str]:
    with pytest.MonkeyPatch.context() as patch:
        world = World(ranks=5, settings=SETTINGS)
        try:
            histories = Histories(world, seed, patch)
            for _ in range(events):
                histories.happen()
            return histories.decided
        finally:
            world.fleet.stop(drain=False)


@given(st.integers(0, 10**6))
def test_decisions_are_those_of_a_look_at_every_request(seed: int) -> None:
    live_through(seed, 60)


def test_random_histories_have_every_kind_of_decision() -> None:
    decided = sum((live_through(seed, 120) for seed in range(8)), Counter[str]())
    assert min(decided[kind] for kind in ("routes", "ScaleUp", "ScaleDown")) > 3, decided


def test_what_has_not_changed_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world, read = World(ranks=5), Counter[str]()
    real = readings._reading

    def counted(instances, *rest):  # type: ignore[no-untyped-def]
        read.update(instance.name for instance in instances)
        return real(instances, *rest)

    monkeypatch.setattr(readings, "_reading", counted)

    def tick() -> None:
        world.controller.tick()
        world.controller._changing = ()  # nothing comes of what it asked for

    try:
        world.ask(40, "long")
        tick()
        assert read == dict.fromkeys(world.launcher.ranks, 1)
        tick()
        world.launcher.ranks["r1"].beat()  # it says what it said before
        tick()
        assert read == dict.fromkeys(world.launcher.ranks, 1)
        world.launcher.ranks["r1"].steps += 1
        world.launcher.ranks["r1"].beat()
        tick()
        assert read == dict.fromkeys(world.launcher.ranks, 1) | {"r1": 2}
    finally:
        world.fleet.stop(drain=False)
