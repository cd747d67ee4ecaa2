"""When a deployment changes by itself, what its load is, and how busy devices are: all by a clock of the test."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.cluster.control.messages import RuntimeView
from elastic.cluster.deployment.busy import NOW_S, BusyShares
from elastic.cluster.deployment.deployments import _busy
from elastic.cluster.deployment.devices import DeviceBook
from elastic.cluster.deployment.hysteresis import Hysteresis, Replanning
from elastic.cluster.deployment.load_meter import LoadMeter, _upward
from elastic.controller.snapshot import RequestStats
from elastic.engines.pipeline.turn import StageTimes
from elastic.errors import CapacityError, ConfigError
from elastic.planning.deployment.devices import Stage
from elastic.planning.deployment.placing import Deployment, Refusal
from elastic.planning.estimate.configuration import Configuration
from elastic.planning.estimate.devices import SHEETS, Device
from elastic.planning.estimate.intent import Intent
from elastic.planning.estimate.performance import Load
from elastic.planning.estimate.ranking import Estimate

SETTINGS = Replanning(better=0.15, patience_s=10, dwell_s=60)
FAST = Intent("latency")


def estimate(latency_s: float, why_not: str = "") -> Estimate:
    return Estimate(Configuration(), (), (), "assumed", why_not, 1, latency_s=latency_s)


def best(latency_s: float) -> Deployment:
    return Deployment(Configuration(2), (Stage(range(4), ("cpu#a", "cpu#b"), 1),), 1, estimate(latency_s), ())


def looks(seen: list[tuple[float, Estimate, Deployment | Refusal, bool]]) -> list[float]:
    """When it was to change, of looks at these times; each change happens."""
    hysteresis, changes = Hysteresis(SETTINGS, 0.0), []
    for now_s, present, other, moved in seen:
        if hysteresis.look(now_s, best(1.0), present, other, FAST, moved=moved):
            changes.append(now_s)
            hysteresis.changed(now_s, "test")
    return changes


def test_a_better_configuration_must_be_so_for_a_while_and_after_a_rest() -> None:
    assert looks([(t, estimate(1.0), best(0.5), True) for t in range(0, 120, 5)]) == [60]


def test_one_that_is_little_better_is_never_chosen() -> None:
    assert looks([(t, estimate(1.0), best(0.86), True) for t in range(0, 500, 5)]) == []


def test_one_that_cannot_stay_changes_without_a_rest_but_not_at_once() -> None:
    assert looks([(t, estimate(1.0, "serves 1 request/s"), best(9.0), True) for t in range(0, 30, 5)]) == [10, 25]


def test_load_that_goes_up_and_down_changes_nothing() -> None:
    assert looks([(t, estimate(1.0), best(0.5), t % 8 < 4) for t in range(0, 500, 2)]) == []


def test_instances_that_are_not_needed_go_after_a_rest() -> None:
    hysteresis = Hysteresis(SETTINGS, 0.0)
    plan = replace(best(1.0), stages=2 * best(1.0).stages)
    times = range(0, 120, 20)
    seen = [hysteresis.look(now_s, plan, estimate(1.0), best(1.0), FAST, moved=True) for now_s in times]
    assert seen == [False, False, False, True, True, True]
    assert hysteresis.reason == "fewer devices serve the load; TP2 PP1 full could be instead, for 100 s now"


def test_where_nothing_fits_it_stays_and_says_so() -> None:
    hysteresis = Hysteresis(SETTINGS, 0.0)
    for now_s in range(100):
        lacking = estimate(1.0, "cpu#a lacks 1 MiB")
        assert not hysteresis.look(now_s, best(1.0), lacking, Refusal(()), FAST, moved=False)
    assert "cpu#a lacks 1 MiB" in hysteresis.reason
    assert "nothing else fits" in hysteresis.reason


@pytest.mark.parametrize("wrong", [{"tick_s": 0}, {"better": 1}, {"patience_s": -1}, {"dwell_s": -1}])
def test_wrong_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        replace(SETTINGS, **wrong)


def stats(arrived: int, prompt: int, completed: int, generated: int) -> RequestStats:
    return RequestStats(
        arrived=arrived, prompt_tokens=arrived * prompt, completed=completed, generated_tokens=completed * generated
    )


def test_the_load_is_that_of_the_last_minute_and_no_less_than_expected() -> None:
    meter = LoadMeter(Load(32, 24, 0.5))
    assert meter.load == Load(32, 24, 0.5)
    meter.tell(0.0, stats(0, 0, 0, 0))
    meter.tell(5.0, stats(10, 64, 5, 20))
    assert meter.load == Load(32, 24, 0.5), "five seconds say nothing of a rate"
    meter.tell(20.0, stats(40, 64, 30, 20))
    assert meter.load == Load(64, 24, 2.0), "answers are shorter than expected, prompts are longer"
    meter.tell(21.0, replace(stats(40, 64, 30, 20), prompt_tokens=30 * 64, rejected=10))
    assert meter.load.prompt == 64, "no tokens are counted of requests that were refused"
    meter.tell(40.0, replace(stats(80, 64, 31, 20), generated_tokens=4000))
    assert meter.load == Load(64, 50, 2.0), "one that has ended did not get the tokens of those that go on"
    meter.tell(100.0, stats(41, 64, 41, 20))
    assert meter.load.rate == 0.5
    meter.expected = Load(512, 128, 7.0)
    assert meter.load == Load(512, 128, 7.0)


@pytest.mark.parametrize(
    ("arrived", "prompt", "load"),
    [
        (101, 512, Load(512, 24, 1.7)),
        (102, 513, Load(520, 24, 1.7)),
        (60, 1290, Load(1300, 24, 1.0)),
        (2, 9, Load(512, 24, 0.5)),
    ],
)
def test_what_is_more_than_expected_is_rounded_upward_to_two_digits(arrived: int, prompt: int, load: Load) -> None:
    meter = LoadMeter(Load(512, 24, 0.5))
    meter.tell(0.0, stats(0, 0, 0, 0))
    meter.tell(60.0, stats(arrived, prompt, arrived, 20))
    assert meter.load == load


@settings(max_examples=50)
@given(st.floats(1e-3, 1e5))
def test_a_measured_rate_rises_by_a_tenth_at_the_most(rate: float) -> None:
    rounded = _upward(rate, 0.0)
    assert rate * (1 - 1e-6) <= rounded <= 1.1 * rate * (1 + 1e-6)
    assert _upward(rounded, 0.0) == rounded


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(0.1, 3), st.floats(0, 1)), min_size=2, max_size=80))
def test_a_devices_share_is_what_its_rank_computed_of_the_window(ticks: list[tuple[float, float]]) -> None:
    shares, now_s, busy_s = BusyShares(window_s=1000), 0.0, 5.0
    shares.tell(now_s, {("a", "m", "r0"): busy_s})
    for seconds, share in ticks:
        now_s, busy_s = now_s + seconds, busy_s + seconds * share
        shares.tell(now_s, {("a", "m", "r0"): busy_s, ("b", "m", "r1"): 0.0})
    assert shares.shares()["a"] == pytest.approx((busy_s - 5.0) / now_s)
    assert shares.shares()["b"] == 0.0


def test_a_rank_that_begins_anew_takes_nothing_from_the_others() -> None:
    shares = BusyShares(window_s=100)
    shares.tell(0.0, {("a", "m", "r0"): 50.0})
    shares.tell(10.0, {("a", "m", "r0"): 55.0})
    shares.tell(20.0, {("a", "m", "r1"): 2.0})
    assert shares.shares()["a"] == pytest.approx((5 + 2) / 20)
    assert shares.of_ranks(NOW_S)["a"] == pytest.approx(0.2)
    shares.tell(30.0, {("a", "m", "r1"): 2.0, ("a", "n", "r0"): 1.0})
    shares.tell(40.0, {("a", "m", "r1"): 2.0, ("a", "n", "r0"): 9.0})
    assert shares.shares(without="n") == {"a": pytest.approx(7 / 40)}
    assert shares.shares()["a"] == pytest.approx(7 / 40 + 8 / 10)


def test_a_rank_that_could_not_be_asked_for_a_moment_has_not_computed_all_its_life_since() -> None:
    shares = BusyShares(window_s=100)
    for now_s in range(20):
        ranks = {("a", "m", "r0"): 1000 + 0.5 * now_s, ("b", "m", "r1"): 0.0}
        shares.tell(now_s, {each: seconds for each, seconds in ranks.items() if each[0] == "b" or now_s != 10})
    assert shares.shares() == {"a": pytest.approx(0.5), "b": 0.0}
    assert shares.of_ranks(NOW_S)["a"] == pytest.approx(0.5)


def test_of_ranks_that_have_gone_nothing_is_kept_behind_the_window() -> None:
    shares = BusyShares(window_s=10)
    for now_s in range(30):
        mine = {("a", "m", "r0"): float(now_s)} if now_s < 5 else {}
        shares.tell(now_s, {**mine, ("b", "n", "r1"): 0.0})
        assert ("a" in shares.shares()) == (now_s < 15)
    assert shares.shares() == {"b": 0.0}
    assert shares._last.keys() == {("b", "n", "r1")}
    assert shares.settled("a")


def test_a_device_is_as_busy_as_the_larger_of_what_ranks_and_nvml_say() -> None:
    devices = book()
    for now_s in range(11):
        devices.busy.tell(now_s, {("a", "m", "r0"): 0.2 * now_s, ("b", "m", "r1"): 0.5 * now_s}, {"a": 0.9, "b": 0.4})
    assert devices.busy.shares() == {"a": pytest.approx(0.9), "b": pytest.approx(0.5)}
    assert devices.busy.others() == {"a": pytest.approx(0.7), "b": 0.0}
    assert [state.load for state in devices.states()] == [pytest.approx(0.9), pytest.approx(0.5)]
    assert [state.load for state in devices.states(without="m")] == [pytest.approx(0.7), 0.0], "its own is not others'"
    devices.busy.tell(11, {("a", "m", "r0"): 2.2})
    assert devices.busy.shares()["a"] == pytest.approx(0.2), "nobody tells any more"


def test_utilization_comes_to_the_book_with_a_look_at_each_rank() -> None:
    def view(utilization: float | None) -> RuntimeView:
        return RuntimeView(None, None, times=StageTimes(busy_s=2.0), utilization=utilization)

    views = {"one": {("a", "r0"): view(0.3), ("b", "r2"): view(None)}, "two": {("a", "r1"): view(0.6)}}
    seconds, utilization = _busy(views)
    assert seconds == {("a", "one", "r0"): 2.0, ("b", "one", "r2"): 2.0, ("a", "two", "r1"): 2.0}
    assert utilization == {"a": 0.6}


def book() -> DeviceBook:
    return DeviceBook([Device(name, SHEETS["h100"], 100) for name in ("a", "b")])


def test_devices_are_not_given_twice() -> None:
    devices = book()
    devices.reserve("one", {"a": 70})
    with pytest.raises(CapacityError, match="a has 30 bytes left for 'two', which needs 31"):
        devices.reserve("two", {"a": 31, "b": 1})
    assert devices.free() == {"a": 30, "b": 100}
    devices.reserve("two", {"a": 30})
    assert devices.states("two", kept_bytes=5)[0].free_bytes == 25
    assert devices.states()[0].models == ("one", "two")
    devices.release("one")
    assert devices.free() == {"a": 70, "b": 100}


def test_a_device_that_shrinks_below_what_is_reserved_lets_that_shrink_too() -> None:
    devices = book()
    devices.reserve("one", {"a": 70})
    devices.resize("a", 50)
    assert devices.free() == {"a": 0, "b": 100}
    devices.reserve("one", {"a": 60})
    with pytest.raises(CapacityError):
        devices.reserve("one", {"a": 65})
    with pytest.raises(ConfigError, match="no device 'c'"):
        devices.resize("c", 1)


def test_a_deployment_gets_what_a_guest_has_at_the_same_moment() -> None:
    devices, recalled = book(), list[str]()

    def recall() -> None:
        recalled.append("guest")
        devices.release("guest")

    class Lock:
        """Has a deployment come as soon as the guest lets go of the lock for the first time."""

        def __init__(self) -> None:
            self.lock, self.comes = threading.Lock(), True

        def __enter__(self) -> None:
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()
            comes, self.comes = self.comes, False
            if comes:
                devices.reserve("deployment", {"a": 100})

    devices._lock = Lock()  # type: ignore[assignment]
    devices.reserve("guest", {"a": 60}, recall)
    assert recalled == ["guest"]
    assert (devices.reserved("guest"), devices.reserved("deployment")) == ({}, {"a": 100})
