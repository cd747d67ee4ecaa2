"""The fleet's policy of lengths at work, on ranks without models: long requests wait, and have ranks share layers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from elastic import CapacityError, ConfigError, clock
from elastic.cluster.control.messages import Submit
from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.groups.results import GroupStatus, Resharded
from elastic.cluster.fleet.lengths.controller import LengthController
from elastic.config import Lengths
from elastic.controller.policies.group_costs import GroupPrice
from elastic.engines.base import Request
from elastic.engines.core.kv_state import KVFormat
from elastic.engines.pipeline.path import LayerPath
from elastic.errors import StateError
from support.cluster.fake_rank import BLOCK, FakeLauncher, FakeRank
from support.processes import wait_until
from support.serving.generations import Collector

BLOCKS = {1: 10, 2: 28, 4: 70}
"""Of an instance, by its degree."""
AT_ONCE = Lengths(wait_s=0.0, dwell_s=0.0, cooldown_s=0.0, patience_s=5.0)


class Verbs:
    """What the controller asks of a fleet: fake ranks have more blocks when they share layers."""

    def __init__(self, launcher: FakeLauncher, capacity: dict[int, int] = BLOCKS) -> None:
        self.launcher, self.known = launcher, capacity
        self.units: list[tuple[str, ...]] = []
        self.asked: list[tuple[tuple[str, ...], int]] = []
        self.why: list[str] = []
        self.layers_per_step: list[int | None] = []
        """Of each reshard, dry runs too."""
        self.fault: Exception | None = None
        self.unmeasured: Exception | None = None
        self.entered, self.may_go = threading.Event(), threading.Event()
        self.measuring, self.may_measure = threading.Event(), threading.Event()
        self.may_go.set()
        self.may_measure.set()

    def groups(self) -> tuple[GroupStatus, ...]:
        return tuple(
            GroupStatus(unit, {r: LayerPath(r, unit, 1, len(unit)) for r in unit}, {}, {}, {}, tp=len(unit))
            for unit in self.units
        )

    def get_ready(self) -> None:
        pass

    def capacity(self, degrees: Sequence[int]) -> dict[str, dict[int, int]]:
        self.measuring.set()
        assert self.may_measure.wait(30)
        if self.unmeasured is not None:
            raise self.unmeasured
        return {name: {d: self.known[d] for d in degrees if d in self.known} for name in self.launcher.ranks}

    def reshard(
        self,
        instances: str | Sequence[str],
        *,
        tp: int,
        timeout_s: float = 0,
        dry_run: bool = False,
        why: str = "",
        layers_per_step: int | None = None,
    ) -> Resharded:
        self.layers_per_step.append(layers_per_step)
        names = (instances,) if isinstance(instances, str) else tuple(instances)
        if dry_run:
            return Resharded("planned", members=names, tp=tp, price=GroupPrice(0.5, 0, 0, 2, 0.0))
        self.why.append(why)
        self.asked.append((names, tp))
        self.entered.set()
        assert self.may_go.wait(30)
        if self.fault is not None:
            raise self.fault
        members = tuple(r for name in names for r in next((u for u in self.units if name in u), (name,)))
        self.units = [unit for unit in self.units if unit[0] not in members]
        parts = [members[first : first + tp] for first in range(0, len(members), tp)]
        self.units += [part for part in parts if len(part) > 1]
        for part in parts:
            for rank in part:
                self.give(rank, BLOCKS[len(part)] // len(part))
        return Resharded("applied", members=members, tp=tp)

    def give(self, rank: str, blocks: int) -> None:
        """Have a rank's instance have another limit, and say so."""
        self.launcher.ranks[rank].blocks = blocks
        self.launcher.ranks[rank].beat()


class World:
    """A fleet, its verbs, and a controller that ticks when the test says so."""

    def __init__(self, ranks: int = 2, settings: Lengths = AT_ONCE, **options: Any) -> None:
        self.launcher = FakeLauncher(lambda spec: FakeRank(spec.name, blocks=BLOCKS[1]))
        self.fleet = Fleet("no model", ranks=ranks, launch=self.launcher, replace=False, beat_timeout_s=1e6)  # type: ignore[arg-type]
        self.fleet.start()
        self.verbs = Verbs(self.launcher, **options)
        self.dispatcher = self.fleet._dispatcher
        self.controller = LengthController(self.dispatcher, self.verbs, settings)
        self.dispatcher.on_waiting = lambda: None  # as if it had started
        self.controller._measure()
        self.controller._note_reach()
        self.heard = Collector()

    def ask(self, blocks: int, name: str, answer: int = 4) -> None:
        self.fleet.submit(Request((1,) * (blocks * BLOCK - answer), answer, ignore_eos=True, id=name), self.heard)

    def tick(self) -> None:
        """Decide, and do what was asked for."""
        plan = self.controller.tick()
        assert plan is not None
        for change in (*plan.ups, *plan.downs):
            self.controller.change(change)
        self.controller._changing = ()

    def given(self) -> dict[str, str]:
        """Who was sent where, of those that ranks have not taken yet."""
        ranks = self.launcher.ranks.items()
        return {m.states[0].request.id: name for name, r in ranks for m in r.inbox if isinstance(m, Submit)}


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(*args: Any, **options: Any) -> World:
        worlds.append(World(*args, **options))
        return worlds[-1]

    yield make
    for one in worlds:
        one.verbs.may_go.set()
        one.verbs.may_measure.set()
        one.controller.stop()
        one.fleet.stop(drain=False)


def test_a_fleet_at_rest_is_not_looked_at_request_by_request(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    w = world()
    w.ask(2, "short")
    w.tick()
    reads = list[object]()
    read = w.controller._readings.read
    monkeypatch.setattr(w.controller._readings, "read", lambda *given: reads.append(given) or read(*given))
    w.tick()
    assert (reads, w.controller.reason) == ([], "all is well")
    w.ask(12, "long")
    w.tick()
    w.tick()
    assert len(reads) == 2, "somebody waits, then ranks share layers"
    assert w.verbs.groups()


def test_requests_go_to_the_least_loaded(world: Callable[..., World]) -> None:
    w = world()
    for name in "abcd":
        w.ask(2, name)
    w.tick()
    assert sorted(w.given().values()) == ["r0", "r0", "r1", "r1"]
    w.fleet.check()


def test_a_request_too_long_for_each_rank_has_two_share_their_layers_and_these_part_again(
    world: Callable[..., World],
) -> None:
    w = world()
    w.ask(12, "long")
    assert w.fleet.status().queued == 1
    w.tick()
    assert w.verbs.asked == [(("r0", "r1"), 2)]
    assert w.verbs.why[0].startswith("request long is too long for each of r0, r1; 2,048 bytes lack; offered: reshard ")
    assert "0.5 s for 18,432 bytes; reshard: the cheapest that suffices" in w.verbs.why[0]
    w.tick()
    assert w.given().keys() == {"long"}
    w.launcher.step(6)
    assert w.heard.ends["long"].finish == "length"
    w.tick()
    assert w.verbs.asked[1:] == [(("r0",), 1)]
    w.fleet.check()


@pytest.mark.parametrize("most", [2, None])
def test_so_many_layers_change_at_one_pause_as_the_settings_say(world: Callable[..., World], most: int | None) -> None:
    w = world(settings=replace(AT_ONCE, layers_per_step=most))
    w.ask(12, "long")
    w.tick()
    assert w.verbs.layers_per_step == [most] * 2, "its price, and the change"
    w.tick()
    w.launcher.step(6)
    w.tick()
    assert w.verbs.asked == [(("r0", "r1"), 2), (("r0",), 1)]
    assert w.verbs.layers_per_step == [most] * 3


def test_short_ones_go_on_meanwhile_and_pass_who_waits_for_ranks_to_become_one(world: Callable[..., World]) -> None:
    w = world(4, Lengths(wait_s=0.0, most_ranks=2))
    w.ask(12, "long")
    w.ask(3, "short")
    plan = w.controller.tick()
    assert plan is not None
    (up,) = plan.ups
    assert w.given().keys() == {"short"}
    assert w.given()["short"] not in up.instances
    w.ask(3, "another")
    w.controller.tick()  # the change is under way
    assert w.given()["another"] not in up.instances
    assert w.fleet.status().queued == 1


def test_who_fits_by_its_blocks_and_not_by_its_sectors_is_too_long_for_a_rank(world: Callable[..., World]) -> None:
    """A rank has 10 blocks; each of two groups of layers takes whole sectors of 4, so 8 and 2 blocks take 12."""
    w = world()
    groups = KVFormat(BLOCK, "head_centric", "float32", 2, 8, (((0,), None), ((1,), 2 * BLOCK)))
    for instance in w.fleet._dispatcher.instances.values():
        instance.hello, instance.kv_format = replace(instance.hello, kv=groups, sector_blocks=(4, 4)), groups
    w.ask(8, "between")
    w.tick()
    assert w.verbs.asked == [(("r0", "r1"), 2)]
    w.ask(4, "short")
    w.tick()
    assert w.given().keys() == {"between", "short"}
    w.launcher.step(6)
    w.tick()
    assert w.verbs.asked[1:] == [(("r0",), 1)], "it parts again"
    w.fleet.check()


def test_who_is_larger_than_its_instances_limit_now_is_the_one_whom_limits_follow(world: Callable[..., World]) -> None:
    w = world()
    w.ask(20, "long")
    w.tick()
    w.tick()
    assert w.given() == {}, "each of the two has 14"
    next_one = w.dispatcher.next_for(("r0", "r1"))
    assert next_one is not None
    assert next_one.request.id == "long"
    w.ask(3, "short")
    w.tick()
    assert w.given() == {}, "it is promised its place"
    w.verbs.give("r1", 4)
    w.verbs.give("r0", 24)
    w.tick()
    assert w.given()["long"] == "r0"
    w.fleet.check()


def test_what_no_degree_holds_is_refused_at_once(world: Callable[..., World]) -> None:
    w = world()
    with pytest.raises(CapacityError, match="fits in no instance"):
        w.ask(29, "too long")
    four = world(4)
    four.ask(29, "long")
    with pytest.raises(CapacityError, match="fits in no instance"):
        four.ask(71, "too long")
    four.tick()
    assert four.verbs.asked[0][1] == 4


def test_what_only_ranks_of_larger_budgets_hold_goes_to_them_and_what_no_set_holds_is_refused(
    world: Callable[..., World],
) -> None:
    w = world(4)
    less = {1: 7, 2: 20, 4: 50}
    w.controller._capacity = {"r0": less, "r1": less, "r2": less, "r3": BLOCKS}
    w.controller._note_reach()
    for blocks in (51, 70):
        with pytest.raises(CapacityError, match="fits in no instance"):
            w.ask(blocks, "too long")
    w.controller._capacity = {"r0": less, "r1": BLOCKS, "r2": less, "r3": BLOCKS}
    w.controller._note_reach()
    w.ask(26, "long")
    w.tick()
    assert w.verbs.asked == [(("r1", "r3"), 2)]
    w.controller._capacity = {"r0": less, "r1": less, "r2": less, "r3": BLOCKS}
    w.verbs.units = [("r2", "r3")]
    snapshot = w.controller._readings.read(w.verbs.groups(), w.controller._capacity)
    assert snapshot is not None
    assert [reading.room for reading in snapshot.instances if reading.degree == 2] == [20], "of the two the least"


def test_ranks_of_other_hosts_do_not_count(world: Callable[..., World]) -> None:
    w = world()
    (first, *_) = w.fleet._dispatcher.instances.values()
    first.hello = replace(first.hello, host="far")
    w.controller._note_reach()
    with pytest.raises(CapacityError, match="fits in no instance"):
        w.ask(12, "long")


@pytest.mark.parametrize("error", [StateError, AssertionError])
def test_a_change_that_fails_is_told_and_asked_for_again(
    world: Callable[..., World], caplog: pytest.LogCaptureFixture, error: type[Exception]
) -> None:
    w = world()
    w.verbs.fault = error("a rank holds its breath")
    w.controller.start()
    w.ask(12, "long")
    assert w.verbs.entered.wait(30)
    wait_until(lambda: len(w.verbs.asked) >= 3, "it asked once")
    w.verbs.fault = None
    wait_until(lambda: "long" in w.given(), "the long one waits")
    assert caplog.text.count("holds its breath") == 1


def test_requests_are_sent_although_a_look_at_them_had_a_bug(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    w = world()
    read, failed = w.controller._readings.read, threading.Event()

    def fails_once(*about: Any) -> Any:
        if not failed.is_set():
            failed.set()
            raise KeyError("r1")
        return read(*about)

    monkeypatch.setattr(w.controller._readings, "read", fails_once)
    w.controller.start()
    w.ask(3, "short")
    wait_until(lambda: "short" in w.given(), "the short one waits")
    assert failed.is_set()


def test_the_threads_send_and_change_beside_each_other(world: Callable[..., World]) -> None:
    w = world(4, Lengths(wait_s=0.0, most_ranks=2, tick_s=10.0))
    w.verbs.may_go.clear()
    w.controller.start()
    w.ask(12, "long")
    assert w.verbs.entered.wait(30)
    w.ask(3, "short")
    wait_until(lambda: "short" in w.given(), "the short one waits")
    assert "long" not in w.given()
    w.verbs.may_go.set()
    wait_until(lambda: "long" in w.given(), "the long one waits")


def test_four_at_once_part_while_short_requests_go_on(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What two of them would hold is not measured then."""
    w = world(4, Lengths(step=4, wait_s=0.0, dwell_s=1.0))
    now_s = clock.now()
    w.ask(12, "long")
    w.tick()
    assert w.verbs.asked == [(("r0", "r1", "r2", "r3"), 4)]
    w.ask(3, "short", answer=10)
    w.tick()
    for rank in w.launcher.ranks.values():
        rank.step(5)
    assert w.heard.ends.keys() == {"long"}
    monkeypatch.setattr(clock, "now", lambda: now_s + 60)
    w.tick()
    assert w.verbs.asked[1:] == [(("r0",), 1)]


def test_ranks_become_one_for_nobody_who_has_gone_while_others_did(world: Callable[..., World]) -> None:
    w = world(4, Lengths(wait_s=0.0, most_ranks=2, tick_s=10.0))
    w.verbs.may_go.clear()
    w.controller.start()
    w.ask(20, "first")
    assert w.verbs.entered.wait(30)
    w.ask(21, "second")
    wait_until(lambda: len(w.controller._changing) == 2, "the second one asks for no ranks")
    w.fleet.cancel("second")
    w.verbs.may_go.set()
    wait_until(lambda: not w.controller._changing, "it changes for ever")
    assert [names for names, _ in w.verbs.asked] == [("r0", "r1")]
    w.ask(21, "third")
    wait_until(lambda: len(w.verbs.asked) == 2, "who comes behind it has no ranks either")


@pytest.mark.parametrize("in_a_group", [False, True])
def test_what_is_too_long_since_limits_were_lowered_is_refused(world: Callable[..., World], in_a_group: bool) -> None:
    w = world()
    w.controller.start()
    w.verbs.known = {1: 6, 2: 20}
    with w.dispatcher.lock:
        for instance in w.dispatcher.instances.values():
            instance.group, instance.group_blocks = (("r0", "r1"), 20) if in_a_group else ((), 0)
    for name in () if in_a_group else ("r0", "r1"):
        w.verbs.give(name, 6)
    wait_until(lambda: {i.policy_blocks for i in w.dispatcher.instances.values()} == {20}, "none measured again")
    with pytest.raises(CapacityError, match="fits in no instance"):
        w.ask(24, "long")


def test_requests_are_sent_while_ranks_are_measured_that_do_not_answer(world: Callable[..., World]) -> None:
    w = world(4, AT_ONCE)
    w.controller.start()
    w.verbs.measuring.clear()
    w.verbs.may_measure.clear()
    w.launcher.ranks["r3"].die()
    assert w.verbs.measuring.wait(30)
    w.ask(3, "short")
    wait_until(lambda: "short" in w.given(), "the short one waits")
    assert w.dispatcher.instances["r0"].policy_blocks == BLOCKS[2], "what is known of those that are there holds"
    w.ask(12, "long")
    w.verbs.may_measure.set()
    wait_until(lambda: "long" in w.given(), "the long one waits")


def test_a_measurement_that_fails_is_made_again(world: Callable[..., World], caplog: pytest.LogCaptureFixture) -> None:
    w = world()
    w.controller.start()
    w.verbs.known, w.verbs.unmeasured = {1: 10, 2: 20}, StateError("a rank holds its breath")
    w.verbs.give("r0", 9)
    wait_until(lambda: "holds its breath" in caplog.text, "none was made")
    w.verbs.unmeasured = None
    wait_until(lambda: w.dispatcher.instances["r0"].policy_blocks == 20, "none was made again")


def test_when_it_stops_requests_go_in_order_again(world: Callable[..., World]) -> None:
    w = world()
    w.ask(3, "a")
    assert w.given() == {}
    w.controller.stop()
    assert w.given().keys() == {"a"}
    w.ask(3, "b")
    assert w.given().keys() == {"a", "b"}


def test_layers_that_are_not_cut_are_refused_in_words(world: Callable[..., World]) -> None:
    w = world(capacity={1: 10})
    with pytest.raises(ConfigError, match="start the fleet with shards=4"):
        w.controller.start()


def test_it_is_a_policy_of_a_fleet() -> None:
    both = Fleet("no model", policy=("drop", Lengths(most_ranks=2)))
    assert [spec.wrap["shards"] for spec in both._specs] == [4]
    with pytest.raises(ConfigError, match="twice"):
        Fleet("no model", policy=("lengths", Lengths()))
    assert Fleet("no model", policy=("balance", Lengths(most_ranks=2))).status().policy == ""
