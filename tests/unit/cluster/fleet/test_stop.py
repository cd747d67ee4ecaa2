"""Stopping a fleet: whoever is interrupted, and however many do it, all ranks and requests have ended at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elastic import ConfigError, Overload, StateError
from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.rank.spec import RankSpec
from elastic.engines.base import Request
from support.cluster.fake_rank import FakeLauncher, FakeRank
from support.serving.generations import Collector


class World:
    """A fleet of one fake rank, with a request that ends only if the rank is told to step."""

    def __init__(self) -> None:
        self.launcher, self.heard = FakeLauncher(), Collector()
        self.fleet = Fleet("no model", launch=self.launcher, beat_timeout_s=1e6, hang_timeout_s=1e6, replace=False)
        self.fleet.start()
        self.fleet.submit(Request((1, 2, 3), 4, id="a"), self.heard)
        self.waits = threading.Event()
        changed = self.fleet._dispatcher.changed
        wait_for = changed.wait_for
        changed.wait_for = lambda *args: (self.waits.set(), wait_for(*args))[1]  # type: ignore[method-assign]

    @property
    def rank(self) -> FakeRank:
        return self.launcher.ranks["r0"]

    def stopping(self, **options: Any) -> threading.Thread:
        """Stop it on a thread, which is returned."""
        thread = threading.Thread(target=self.fleet.stop, kwargs=options)
        thread.start()
        return thread

    def require_ended(self) -> None:
        assert self.rank.lost
        assert self.launcher.closed
        assert self.heard.ends["a"].finish == "cancelled"


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.fleet.stop(drain=False)


def once(act: Callable[[], object], then: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does something else the first time that it is called."""
    acts = iter([act])

    def call(*args: Any, **options: Any) -> Any:
        for first in acts:
            first()
        return then(*args, **options)

    return call


def interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_while_requests_are_waited_for_ends_all(world: World) -> None:
    changed = world.fleet._dispatcher.changed
    changed.wait_for = once(interrupt, changed.wait_for)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        world.fleet.stop()
    world.require_ended()


@pytest.mark.parametrize("where", ["policies", "rank", "launcher"])
def test_a_stop_that_was_interrupted_is_finished_by_a_later_one(world: World, where: str) -> None:
    obj, name = {
        "policies": (world.fleet._policies, "stop"),
        "rank": (world.rank, "close"),
        "launcher": (world.launcher, "close"),
    }[where]
    setattr(obj, name, once(interrupt, getattr(obj, name)))
    with pytest.raises(KeyboardInterrupt):
        world.fleet.stop(drain=False)
    world.fleet.stop()
    world.require_ended()


def test_one_that_does_not_drain_ends_what_another_one_waits_for(world: World) -> None:
    stopping = world.stopping()
    assert world.waits.wait(20)
    world.fleet.stop(drain=False)
    world.require_ended()
    stopping.join(20)
    assert not stopping.is_alive()


def test_one_that_drains_waits_with_another_one(world: World) -> None:
    first = world.stopping()
    assert world.waits.wait(20)
    world.waits.clear()
    second = world.stopping()
    assert world.waits.wait(20), "it waits for the requests, too"
    world.rank.step(4)
    for thread in (first, second):
        thread.join(20)
        assert not thread.is_alive()
    assert world.heard.ends["a"].finish == "length"
    assert world.launcher.closed


def test_a_request_that_was_taken_as_a_drain_begins_is_drained(world: World) -> None:
    submit, stopping = world.fleet._dispatcher.submit, list[threading.Thread]()

    def slow(*args: Any) -> None:
        submit(*args)
        stopping.append(world.stopping())
        assert world.waits.wait(20)

    world.fleet._dispatcher.submit = slow  # type: ignore[method-assign]
    world.fleet.submit(Request((1, 2), 4, id="b"), world.heard)
    world.rank.step(4)
    stopping[0].join(20)
    assert not stopping[0].is_alive()
    assert {world.heard.ends[name].finish for name in "ab"} == {"length"}


def test_a_request_that_comes_as_a_drain_begins_is_refused(world: World) -> None:
    submit, stopping = world.fleet._dispatcher.submit, list[threading.Thread]()

    def late(*args: Any) -> None:
        stopping.append(world.stopping())
        assert world.waits.wait(20)
        submit(*args)

    world.fleet._dispatcher.submit = late  # type: ignore[method-assign]
    with pytest.raises(StateError, match="the fleet is draining; make a new one"):
        world.fleet.submit(Request((1, 2), 4, id="b"), world.heard)
    world.rank.step(4)
    stopping[0].join(20)
    assert world.heard.ends["a"].finish == "length"
    assert "b" not in world.heard.ends


def test_a_rank_that_loads_in_the_place_of_another_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    launcher, loads, closed = FakeLauncher(), threading.Event(), threading.Event()
    start, close = launcher.start, launcher.close

    def load(spec: RankSpec) -> Any:
        if spec.name == "r0":
            return start(spec)
        loads.set()
        assert closed.wait(20), "it is ended by who started it"
        raise StateError("it was ended while it was loading")

    launcher.start = load  # type: ignore[method-assign]
    launcher.close = lambda: (closed.set(), close())  # type: ignore[method-assign, assign, return-value]
    fleet = Fleet("no model", launch=launcher, beat_timeout_s=1e6, hang_timeout_s=1e6)
    fleet.start()
    launcher.ranks["r0"].die()
    assert loads.wait(20)
    caplog.clear()
    fleet.stop(drain=False)
    assert not caplog.records


def test_a_start_says_that_the_fleet_was_stopped_meanwhile() -> None:
    """It told what became of the first rank, and to start that again."""
    launcher, loads, closed = FakeLauncher(), threading.Event(), threading.Event()
    close = launcher.close

    def load(spec: RankSpec) -> Any:
        loads.set()
        assert closed.wait(20), "it is ended by who started it"
        raise StateError("it was ended while it was loading; start the rank again")

    launcher.start = load  # type: ignore[method-assign]
    launcher.close = lambda: (closed.set(), close())  # type: ignore[method-assign, assign, return-value]
    fleet = Fleet("no model", launch=launcher)
    stopping = threading.Thread(target=lambda: (loads.wait(20), fleet.stop(drain=False)))
    stopping.start()
    with pytest.raises(StateError, match="the fleet was stopped while it started; make a new one"):
        fleet.start()
    stopping.join(20)


def test_a_start_that_was_done_says_that_the_fleet_was_stopped_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """It returned, as if the fleet served."""
    fleet = Fleet("no model", launch=FakeLauncher())

    def stop() -> None:
        stopping = threading.Thread(target=lambda: fleet.stop(drain=False))
        stopping.start()
        stopping.join(20)

    monkeypatch.setattr(fleet._policies, "start", stop)
    with pytest.raises(StateError, match="the fleet was stopped while it started; make a new one"):
        fleet.start()


def test_one_that_begins_while_ranks_end_returns_when_they_have(world: World) -> None:
    entered, go_on, order = threading.Event(), threading.Event(), []
    close = world.launcher.close

    def slow() -> None:
        entered.set()
        assert go_on.wait(20)
        order.append("closed")
        close()

    world.launcher.close = slow  # type: ignore[method-assign]
    first = world.stopping(drain=False)
    assert entered.wait(20)
    second = threading.Thread(target=lambda: (world.fleet.stop(drain=False), order.append("returned")))
    second.start()
    second.join(0.05)
    go_on.set()
    for thread in (first, second):
        thread.join(20)
    assert order == ["closed", "returned"]


def test_a_signal_handler_may_stop_a_fleet_whose_stop_it_interrupts(world: World) -> None:
    def handle() -> None:
        world.fleet.stop(drain=False)

    world.launcher.close = once(handle, world.launcher.close)  # type: ignore[method-assign]
    stopping = world.stopping(drain=False)
    stopping.join(20)
    assert not stopping.is_alive()
    world.require_ended()


def test_seconds_that_are_no_number_leave_it_serving(world: World) -> None:
    for seconds in ("a", -1, float("nan"), True):
        with pytest.raises(ConfigError, match="timeout_s"):
            world.fleet.stop(timeout_s=seconds)  # type: ignore[arg-type]
    assert world.fleet.serving


def test_an_instance_that_a_policy_has_added_does_not_hold_up_the_end_as_it_loads() -> None:
    loads, closed = threading.Event(), threading.Event()

    class Loading(FakeLauncher):
        def start(self, spec: RankSpec) -> Any:
            if spec.name == "r0":
                return super().start(spec)
            loads.set()
            assert closed.wait(20), "its end waits for this"
            raise StateError("the launcher was closed")

        def close(self) -> None:
            closed.set()

    options: dict[str, Any] = {"beat_timeout_s": 1e6, "hang_timeout_s": 1e6}
    fleet = Fleet("no model", launch=Loading(), policy=Overload(scale_out=1, tick_s=1e6), **options)
    fleet.start()
    (overload,) = fleet._policies._changing
    overload._add_instances(1)
    assert loads.wait(20)
    stopping = threading.Thread(target=fleet.stop)
    stopping.start()
    stopping.join(10)
    assert not stopping.is_alive()
    assert closed.is_set()
    assert not overload._is_adding
