"""The fleet's overload policy at work, on ranks without models: it drops once, restores once, and says why."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.cluster.control.messages import RuntimeView
from elastic.cluster.control.stage_questions import Room
from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.groups.results import Dropped, GroupStatus, Resharded, Restored
from elastic.cluster.fleet.overload import controller, shares
from elastic.cluster.fleet.overload.controller import OverloadController
from elastic.cluster.fleet.planning.budgets import Budgets
from elastic.cluster.fleet.records.event_log import EventLog
from elastic.config import Overload
from elastic.controller.fleet_snapshot import FleetSnapshot, GroupReading, MemberReading
from elastic.controller.policies.group_costs import GroupPrice
from elastic.controller.policies.overload import OverloadPlan
from elastic.engines.base import Request
from elastic.engines.pipeline.path import LayerPath
from elastic.errors import CapacityError, ConfigError, StateError
from elastic.planning.arrangement.drop import DropPlan
from elastic.planning.arrangement.stages import Held
from elastic.planning.sharding.shard_pages import ShardPages
from elastic.types import PlaceStatus, PlanStep, Residency, Swap
from support.cluster.fake_rank import FakeLauncher, FakeRank
from support.processes import wait_until
from support.serving.generations import Collector

AT_ONCE = Overload(margin=0.0, cooldown_s=0.0, dwell_s=0.0, idle_s=0.0, pressure_ticks=2, recovery_ticks=2)
WEIGHTS = (8192, 8192)


class Verbs:
    """What the controller asks of a fleet: fake ranks have more blocks when layers were dropped."""

    changing, start_s = False, 10.0

    def __init__(self, launcher: FakeLauncher, fleet: Fleet) -> None:
        self.launcher, self.fleet = launcher, fleet
        self.group: GroupStatus | None = None
        self.asked: list[tuple[str, str]] = []
        self.forms: list[dict[str, Any]] = []
        self.reshard_forms: list[dict[str, Any]] = []
        self.fault: Exception | None = None
        self.drop_s, self.reshard_s = 0.5, 60.0
        self.reshard_fault: Exception | None = None
        self.variants: tuple[str, ...] = ()
        self.swap_pages = 1
        self.rooms: dict[str, Room] = {}
        self.budgets_asked = 0
        self.swapped: dict[str, set[int]] = {"r0": set(), "r1": set()}
        self.entered, self.may_go = threading.Event(), threading.Event()
        self.may_go.set()

    def groups(self) -> tuple[GroupStatus, ...]:
        return () if self.group is None else (self.group,)

    def get_ready(self) -> None:
        pass

    def keep_staging(self) -> None:
        pass

    def budgets(self) -> Budgets:
        self.budgets_asked += 1
        return Budgets(self.rooms, [self.fleet._dispatcher.instances[name] for name in ("r0", "r1")])

    def layer_bytes(self) -> tuple[int, ...]:
        return WEIGHTS

    def drop(
        self, *, plan: DropPlan | None = None, timeout_s: float = 0, dry_run: bool = False, why: str = "", **form: Any
    ) -> Dropped:
        assert plan is not None
        if dry_run:
            price = GroupPrice(self.drop_s, plan.freed_bytes, 0, 2, 0.0)
            return Dropped("planned", groups=plan.groups, freed_bytes=plan.freed_bytes, price=price)
        self.forms.append(form)
        self.asked.append(("drop", why))
        self.entered.set()
        assert self.may_go.wait(30)
        if self.fault is not None:
            raise self.fault
        (group,) = plan.groups
        assert plan.freed_bytes == group.freed_bytes > 0
        paths = {home: LayerPath(home, group.members, 1) for home in group.members}
        keeps = dict(zip(group.members, group.keeps, strict=True))
        caps, alone = dict.fromkeys(paths, 14), dict.fromkeys(paths, 10)
        self.group = GroupStatus(group.members, paths, keeps, caps, alone, shards=keeps)
        self._blocks(14)
        return Dropped("applied", groups=plan.groups, freed_bytes=plan.freed_bytes)

    def look(self, rank: str) -> RuntimeView:
        layers = range(len(WEIGHTS))
        residencies = {
            f"layers.{i}": (Residency("cpu", "int4" if i in self.swapped[rank] else "float32"),) for i in layers
        }
        places = (PlaceStatus("cpu", 4096, 1 << 20, {}, 0, 0, 0, 0),)
        return RuntimeView(SimpleNamespace(residencies=residencies, places=places), None, variants=self.variants)

    def apply(self, rank: str, actions: Any, *, dry_run: bool = False, why: str = "") -> Any:
        if dry_run:
            return tuple(PlanStep(action, "applied", 2048, self.swap_pages, 0, 0.0) for action in actions)
        (action,) = actions
        self.asked.append(("swap" if isinstance(action, Swap) else "swap back", f"{rank} {action.layers}; {why}"))
        self.swapped[rank] ^= set(action.layers)
        return ()

    def restore(
        self, rank: str | None = None, *, sharing: bool = False, timeout_s: float = 0, why: str = "", **form: Any
    ) -> Restored:
        assert self.group is not None
        assert sharing
        self.forms.append(form)
        assert rank in self.group.members
        self.asked.append(("restore", why))
        members, self.group = self.group.members, None
        self._blocks(10)
        return Restored("applied", members=members)

    def reshard(
        self, instances: Any, *, tp: int, timeout_s: float = 0, dry_run: bool = False, why: str = "", **form: Any
    ) -> Resharded:
        self.reshard_forms.append(form)
        if self.reshard_fault is not None:
            raise self.reshard_fault
        if dry_run:
            return Resharded("planned", freed_bytes=6_000, price=GroupPrice(self.reshard_s, 6_000, 0, 2, 0.0))
        self.asked.append(("reshard", f"{' '.join(instances)} tp={tp}; {why}"))
        paths = {home: LayerPath(home, tuple(instances) * 2, shards=tp) for home in instances}
        whole = {home: tuple(range(number, 2 * tp, tp)) for number, home in enumerate(instances)}
        self.group = GroupStatus(tuple(instances), paths, {}, {}, {}, tp, whole)
        return Resharded("applied", members=tuple(instances), tp=tp)

    def _blocks(self, count: int) -> None:
        for rank in self.launcher.ranks.values():
            rank.blocks = count
            rank.beat()


class World:
    """A fleet of two, its verbs, and a controller that ticks when the test says so."""

    def __init__(self, settings: Overload = AT_ONCE, **options: Any) -> None:
        self.launcher = FakeLauncher(lambda spec: FakeRank(spec.name, blocks=10))
        self.fleet = Fleet("no model", ranks=2, launch=self.launcher, replace=False, beat_timeout_s=1e6)  # type: ignore[arg-type]
        self.fleet.start()
        self.verbs, self.log = Verbs(self.launcher, self.fleet), EventLog()
        self.controller = OverloadController(self.fleet._dispatcher, self.verbs, self.log, settings, **options)
        self.heard = Collector()

    def burst(self, count: int, tokens: int = 32) -> None:
        for _ in range(count):
            self.fleet.submit(Request((1,) * 8, tokens), self.heard)
        self.launcher.step()

    def tick(self) -> OverloadPlan:
        plan = self.controller.tick()
        assert plan is not None
        return plan


def room(name: str, pages: int, committed: int) -> Room:
    """Of a rank with two layers of two pages each, and sectors of a page in each layer."""
    weights = (ShardPages((), ((range(2),),)),) * len(WEIGHTS)
    return Room(LayerPath.alone(name, 2), pages, 4096, (1, 1), 99, committed, (0, 0), weights, frozenset(range(2)))


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(settings: Overload = AT_ONCE, **options: Any) -> World:
        worlds.append(World(settings, **options))
        return worlds[-1]

    yield make
    for one in worlds:
        one.verbs.may_go.set()
        one.controller.stop()
        one.fleet.stop(drain=False)


def test_a_burst_has_layers_dropped_and_its_end_has_them_restored(world: Callable[..., World]) -> None:
    w = world()
    w.burst(3)
    assert not w.tick().drops
    assert w.tick().drops
    ((verb, why),) = w.verbs.asked
    assert verb == "drop"
    assert why.startswith("requests wait at the fleet, and no instance has KV for them; ")
    assert "offered: drop 0.5 s for 16,384 bytes; drop: the cheapest that suffices; KV r0 100%, r1 100%" in why
    assert w.verbs.group is not None
    assert w.verbs.group.members == ("r0", "r1")
    w.launcher.step(40)
    assert len(w.heard.ends) == 3
    while w.verbs.group is not None:
        w.tick()
    assert [verb for verb, _ in w.verbs.asked] == ["drop", "restore"]
    assert w.controller.reason.startswith("the overload has gone; KV r0+r1 0%")
    for _ in range(5):
        assert not w.tick().drops
    assert len(w.verbs.asked) == 2


@pytest.mark.parametrize(
    "form",
    [
        {"exchange": "live", "coordinated": True, "layers_per_step": 2},
        {"exchange": "stall", "coordinated": False, "layers_per_step": None},
    ],
)
def test_layers_are_exchanged_as_the_settings_say(world: Callable[..., World], form: dict[str, Any]) -> None:
    w = world(replace(AT_ONCE, **form))
    w.burst(3)
    while w.verbs.group is None:
        w.tick()
    w.launcher.step(40)
    while w.verbs.group is not None:
        w.tick()
    assert w.verbs.forms == [form, form]


def test_without_a_load_nothing_is_done(world: Callable[..., World]) -> None:
    w = world()
    w.burst(1)
    for _ in range(10):
        w.tick()
    assert not w.verbs.asked
    assert w.controller.reason.startswith("all is well; ")


def test_a_shortage_that_no_drop_ends_is_told_once(world: Callable[..., World]) -> None:
    w = world()
    w.burst(30)
    dropped = [drop for _ in range(8) for drop in w.tick().drops]
    assert [drop.freed_bytes for drop in dropped] == [sum(WEIGHTS)]  # as much as can be, once
    (event,) = w.log.events()
    assert event.kind == "overloaded"
    assert "no drop frees enough" in event.why
    assert "more instances would have room" in event.why
    never = world(replace(AT_ONCE, best_effort=False))
    never.burst(30)
    assert not [drop for _ in range(8) for drop in never.tick().drops]
    assert len(never.log.events()) == 1


def test_instances_are_added_up_to_the_most_that_may_be(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "ADD_REST_S", 0.0)
    asked: list[int] = []
    came: list[str] = []

    def add(count: int) -> tuple[str, ...]:
        asked.append(count)
        if len(asked) % 2:
            raise StateError("the host has no room")
        came.append(f"new-{len(came)}")  # the others could not start
        return tuple(came[-1:])

    w = world(replace(AT_ONCE, best_effort=False, scale_out=3), add=add)
    w.burst(60)
    for _ in range(20):
        w.tick()
        if w.controller.adding is not None:
            w.controller.adding.join()
    assert len(came) == 3
    assert asked == [3, 3, 2, 2, 1, 1]
    off = world(add=add)
    off.burst(30)
    for _ in range(5):
        off.tick()
    assert len(came) == 3


def test_an_instance_that_could_not_start_is_not_asked_for_at_once_again(world: Callable[..., World]) -> None:
    asked: list[int] = []

    def add(count: int) -> tuple[str, ...]:
        asked.append(count)
        raise OSError("no file can be opened")

    w = world(replace(AT_ONCE, best_effort=False, scale_out=1), add=add)
    w.burst(30)
    for tries in (1, 2, 3):
        for _ in range(10):
            w.tick()
            if w.controller.adding is not None:
                w.controller.adding.join()
        assert len(asked) == tries
        assert w.controller._rest_s == controller.ADD_REST_S * 2**tries
        w.controller._add_after_s = 0.0  # that time has passed


def test_instances_are_added_later_where_no_thread_could_be_started(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[int] = []
    w = world(replace(AT_ONCE, scale_out=1), add=lambda count: added.append(count) or ("new",))
    with monkeypatch.context() as patch:

        def fail(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError):
            w.controller._add_instances(1)
    assert w.controller.adding is None, "who ends the fleet would join it"
    w.burst(30)
    for _ in range(20):
        w.tick()
    assert w.controller.adding is not None
    w.controller.adding.join()
    assert added == [1]


@pytest.mark.parametrize(
    "fault", [CapacityError("no room", requested_bytes=1, free_bytes=0, total_bytes=0), KeyError("r1")]
)
def test_its_thread_goes_on_when_a_drop_cannot_be(world: Callable[..., World], fault: Exception) -> None:
    w = world(replace(AT_ONCE, tick_s=0.01))
    w.verbs.fault = fault
    w.burst(3)
    w.controller.start()
    wait_until(lambda: len(w.verbs.asked) >= 2, "it gave up")
    w.verbs.fault = None
    wait_until(lambda: w.verbs.group is not None, "it does not try again")


def test_it_stops_when_what_it_does_is_done(world: Callable[..., World]) -> None:
    w = world(replace(AT_ONCE, tick_s=0.01))
    w.verbs.may_go.clear()
    w.burst(3)
    w.controller.start()
    assert w.verbs.entered.wait(30)
    stopping = threading.Thread(target=w.controller.stop)
    stopping.start()
    stopping.join(0.1)
    assert stopping.is_alive()
    w.verbs.may_go.set()
    stopping.join(30)
    assert w.verbs.group is not None
    assert len(w.verbs.asked) == 1


def test_a_drop_is_planned_by_what_ranks_have_room_for(world: Any) -> None:
    w = world()
    w.tick()
    assert not w.verbs.budgets_asked, "nothing waits"
    w.verbs.rooms = {"r0": room("r0", 2, 1), "r1": room("r1", 2, 1)}
    w.burst(6)
    w.verbs.changing = True
    w.tick()
    assert not w.verbs.budgets_asked, "ranks would answer when they have changed"
    w.verbs.changing = False
    assert w.tick().drops, "both have as much: it is no limit"
    assert w.verbs.budgets_asked == 1
    other = world()
    other.verbs.rooms = {"r0": room("r0", 2, 1), "r1": room("r1", 20, 9)}  # r0 has six pages; a layer needs twelve
    other.burst(6)
    for _ in range(3):
        assert not other.tick().drops
    assert "no drop frees enough" in other.controller.reason


class Seen:
    """Readings that a test makes up: one instance is full, and so much waits at it; the other one is idle."""

    def __init__(self, world: World) -> None:
        self.waiting_bytes, self.at_s, self.used_bytes, self.capacity_bytes = 4000, 0.0, 10_000, 10_000
        world.controller._readings = self  # type: ignore[assignment]

    def read(self, *_: Any, busy: bool) -> FleetSnapshot:
        self.at_s += 1.0
        full = GroupReading(
            (reading("r0"),),
            self.capacity_bytes,
            self.used_bytes,
            waiting_bytes=self.waiting_bytes,
            queue_s=1.0,
            running=1,
        )
        return FleetSnapshot(self.at_s, (full, GroupReading((reading("r1"),), 10_000, 0)), WEIGHTS)


def reading(name: str) -> MemberReading:
    return MemberReading(Held(name, frozenset(range(len(WEIGHTS)))), 10_000)


def test_requests_that_can_move_cost_less_than_a_drop_which_follows_if_they_do_not(world: Any) -> None:
    w = world(moves=True)
    seen = Seen(w)
    for _ in range(4):
        assert not w.tick().drops
    (event,) = w.log.events()
    assert event.kind == "overloaded"
    assert "4,000 bytes lack; offered: move 0.001 s for 9,500 bytes, drop 0.5 s" in event.why
    assert "move: the cheapest that suffices" in event.why
    while not w.verbs.asked:  # after MOVES_S
        assert seen.at_s < 8
        w.tick()
    ((verb, why),) = w.verbs.asked
    assert verb == "drop"
    assert "move" not in why.split("offered: ")[1]


def test_layers_are_dropped_where_moves_would_not_be_enough(world: Any) -> None:
    w = world(moves=True)
    Seen(w).waiting_bytes = 9_800
    while not w.verbs.asked:
        w.tick()
    assert "offered: move 0.001 s for 9,500 bytes, drop 0.5 s for" in w.verbs.asked[0][1]


def test_layers_are_dropped_where_nothing_would_be_enough(world: Any) -> None:
    w = world(moves=True)
    Seen(w).waiting_bytes = 50_000
    while not w.verbs.asked:
        w.tick()
    assert (
        "offered: drop 0.5 s for 16,384 bytes; drop: the cheapest for its bytes; none suffices" in w.verbs.asked[0][1]
    )


def test_an_instance_is_added_where_a_drop_would_cost_more(world: Any) -> None:
    added: list[int] = []
    there = threading.Event()

    def add(count: int) -> tuple[str, ...]:
        added.append(count)
        assert there.wait(30)
        return ("new",)

    w = world(replace(AT_ONCE, scale_out=1), add=add)
    w.verbs.drop_s = 60.0
    Seen(w)
    for _ in range(5):
        assert not w.tick().drops  # it is on its way
    there.set()
    assert w.controller.adding is not None
    w.controller.adding.join()
    assert added == [1]
    assert "add 10 s for 10,000 bytes; add: the cheapest that suffices" in w.log.events()[0].why
    while not w.verbs.asked:  # no further one may come
        w.tick()
    assert w.verbs.start_s < 10.0


def test_layers_become_smaller_where_that_costs_less_than_a_drop_and_return_after_it(world: Any) -> None:
    w = world()
    w.verbs.variants, w.verbs.drop_s = ("int4",), 60.0
    seen = Seen(w)
    while not w.verbs.asked:
        assert not w.tick().drops
    ((verb, why),) = w.verbs.asked
    assert verb == "swap"
    assert why.startswith("r0 (1,); "), "it is short, and one layer frees enough"
    assert "drop 60 s for 16,384 bytes, swap 2.5 s for 4,000 bytes with a loss of quality; swap: the cheapest" in why
    seen.capacity_bytes, seen.waiting_bytes = 14_096, 0
    for _ in range(4):
        w.tick()
    assert len(w.verbs.asked) == 1, "its memory is needed"
    seen.used_bytes = 5_000
    w.tick()
    assert len(w.verbs.asked) == 1
    w.tick()
    assert w.verbs.asked[1] == ("swap back", "r0 (1,); the overload has gone")
    assert [event.kind for event in w.log.events()] == ["swapped", "swapped back"]
    seen.capacity_bytes = 10_000
    for _ in range(4):
        w.tick()
    assert len(w.verbs.asked) == 2


def test_of_equal_prices_it_is_the_lossless_one(world: Any) -> None:
    w = world()
    w.verbs.variants, w.verbs.drop_s = ("int4",), 2.5
    Seen(w)
    while not w.verbs.asked:
        w.tick()
    ((verb, why),) = w.verbs.asked
    assert verb == "drop"
    assert "drop 2.5 s for 16,384 bytes, swap 2.5 s for 4,000 bytes with a loss of quality; drop:" in why


def test_a_rank_with_swapped_layers_drops_none_but_can_swap_more(world: Any) -> None:
    w = world()
    w.verbs.variants, w.verbs.drop_s = ("int4",), 60.0
    seen = Seen(w)
    while not w.verbs.asked:
        w.tick()
    w.verbs.drop_s = 0.1  # cheaper now, but not possible
    seen.capacity_bytes = seen.used_bytes = 14_096
    for _ in range(12):
        assert not w.tick().drops
    assert [why[:6] for _, why in w.verbs.asked] == ["r0 (1,", "r0 (0,"]
    assert "r0 have swapped layers" in w.controller.reason
    assert w.verbs.swapped == {"r0": {0, 1}, "r1": set()}


def test_a_swap_that_is_not_enough_is_no_reason_not_to_drop(world: Any) -> None:
    w = world()
    w.verbs.variants, w.verbs.drop_s = ("int4",), 60.0
    Seen(w).waiting_bytes = 9_000
    while not w.verbs.asked:
        w.tick()
    ((verb, why),) = w.verbs.asked
    assert verb == "drop"
    assert "swap 5 s for 8,192 bytes with a loss of quality; drop: the cheapest that suffices" in why


def test_layers_become_smaller_where_none_can_be_dropped(world: Any) -> None:
    w = world(replace(AT_ONCE, best_effort=False))
    w.verbs.swap_pages = 3
    Seen(w).waiting_bytes = 18_000
    for _ in range(4):
        w.tick()
    (told,) = w.log.events()
    assert "2 more instances would have room" in told.why
    w.verbs.variants = ("int4",)
    w.tick()
    ((verb, why),) = w.verbs.asked
    assert (verb, why[:3]) == ("swap", "r0 ")
    assert "offered: swap 15 s for 18,000 bytes with a loss of quality; swap: the cheapest that suffices" in why
    assert [event.kind for event in w.log.events()] == ["overloaded", "swapped"]


def test_where_none_can_be_dropped_it_is_the_cheapest_of_what_can_be_done(world: Any) -> None:
    added: list[int] = []
    w = world(replace(AT_ONCE, best_effort=False, scale_out=2), add=lambda count: added.append(count) or ("new",))
    w.verbs.variants, w.verbs.swap_pages = ("int4",), 3
    Seen(w).waiting_bytes = 18_000
    while not added:
        w.tick()
    assert added == [2]
    assert not w.verbs.asked
    assert "add 10 s for 20,000 bytes; add: the cheapest that suffices" in w.log.events()[0].why


def test_what_waits_at_the_fleet_is_relieved_at_any_instance(world: Any) -> None:
    w = world()
    w.verbs.variants, w.verbs.drop_s = ("int4",), 60.0
    w.verbs.swap_pages = 2
    w.burst(3)
    while not w.verbs.asked:
        assert not w.tick().drops
    ((verb, why),) = w.verbs.asked
    assert (verb, why[:3]) == ("swap", "r0 ")


def test_layers_are_shared_where_that_costs_less_than_a_drop(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "SETTLE_S", 3.0)
    w = world(most_shared=2)
    w.verbs.reshard_s = 0.1
    seen = Seen(w)
    while not w.verbs.asked:
        assert not w.tick().drops
    ((verb, why),) = w.verbs.asked
    assert (verb, why.split(";")[0]) == ("reshard", "r0 r1 tp=2")
    assert "drop 0.5 s for 16,384 bytes, reshard 0.1 s for 6,000 bytes; reshard: the cheapest that suffices" in why
    asked_s = seen.at_s
    while len(w.verbs.asked) < 2:  # still short: they share layers already, so some are dropped
        w.tick()
    assert w.verbs.asked[1][0] == "drop"
    assert seen.at_s >= asked_s + 3.0, "ranks had not said yet what they have"


def test_layers_are_shared_as_the_settings_say(world: Any) -> None:
    form = {"exchange": "stall", "coordinated": False, "layers_per_step": 2}
    w = world(replace(AT_ONCE, **form), most_shared=2)
    w.verbs.reshard_s = 0.1
    Seen(w)
    while not w.verbs.asked:
        w.tick()
    assert w.verbs.asked[0][0] == "reshard"
    assert w.verbs.reshard_forms == [form] * 2, "its price, and the change"


@pytest.mark.parametrize("reason", ["dear", "small", "refused", "nobody has them part again"])
def test_layers_are_dropped_where_sharing_them_is_no_better(world: Any, reason: str) -> None:
    w = world(most_shared=1 if reason.startswith("nobody") else 4)
    w.verbs.reshard_s = 0.6 if reason == "dear" else 0.1
    w.verbs.reshard_fault = ConfigError("layers are not cut") if reason == "refused" else None
    Seen(w).waiting_bytes = 7_000 if reason == "small" else 4_000
    while not w.verbs.asked:
        w.tick()
    assert w.verbs.asked[0][0] == "drop"
    assert ("reshard" in w.verbs.asked[0][1]) is (reason in ("dear", "small"))
