"""The controller: ticks with and without its thread, faults, the end of what it watches, and what it costs."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
import weakref
from concurrent.futures import Future
from typing import Any

import pytest

from elastic import Policy, Swap
from elastic.controller.decision import Plan
from elastic.controller.loop import FAULTS_KEPT, Controller
from elastic.controller.policies.precision import PrecisionPolicy
from elastic.controller.policies.precision_steps import LayerSize
from elastic.controller.sensors.monitor import InstanceReadings, Monitor
from elastic.controller.sensors.request_metrics import RequestMetrics
from elastic.controller.snapshot import DeviceStats, HostStats, MemoryStats, RequestStats, Snapshot
from support.child_process import in_fork
from support.processes import wait_until

KV = MemoryStats(900, 1000, 1000)
SEEN = Snapshot(0.0, RequestStats(), KV, ("float32",) * 2)
SWAP = (Swap((0,), "int4"),)


class Says:
    """A policy that says what it is told to."""

    def __init__(self, *plans: Any) -> None:
        self.plans = list(plans)
        self.states: list[Any] = []

    def decide(self, snapshot: Snapshot, state: Any) -> Any:
        self.states.append(state)
        plan = self.plans.pop(0) if len(self.plans) > 1 else self.plans[0]
        if isinstance(plan, BaseException):
            raise plan
        return plan


def controller(policy: Any, act: Any = lambda actions, why: None, sense: Any = lambda: SEEN) -> Controller:
    return Controller(sense, policy, act, tick_s=0.001)


def test_a_tick_senses_decides_and_acts_and_keeps_the_state() -> None:
    asked: list[Any] = []
    says = Says(Plan((), "calm", 1), Plan(SWAP, "pressure", 2, "KV 90%"))
    one = controller(says, lambda actions, why: asked.append((actions, why)))
    assert one.tick() == Plan((), "calm", 1)
    assert asked == []
    assert one.tick() == Plan(SWAP, "pressure", 2, "KV 90%")
    assert asked == [(SWAP, "pressure (KV 90%)")]
    assert says.states == [None, 1]
    health = one.health()
    assert (health.running, health.ticks, health.actions) == (False, 2, 1)
    assert (health.last_reason, health.last_figures, health.faults) == ("pressure", "KV 90%", ())
    assert health.last_tick_s == pytest.approx(time.time(), abs=60)


def test_a_decision_is_logged_when_its_reason_changes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "elastic.controller.loop")
    calm = [Plan((), "calm", figures=str(i)) for i in range(3)]
    one = controller(Says(*calm, Plan((), "full"), Plan((), "full"), Plan(SWAP, "full"), Plan(SWAP, "full"), calm[0]))
    for _ in range(8):
        one.tick()
    said = [record.getMessage().split(":")[0][:10] + record.getMessage()[-9:] for record in caplog.records]
    assert len(said) == 5, said  # calm; full; two actions; calm


@pytest.mark.parametrize(
    "nonsense",
    [
        None,
        "swap",
        (SWAP, "a tuple"),
        Plan([], "list"),  # type: ignore[arg-type]
        Plan(("swap",), "text"),  # type: ignore[arg-type]
        Plan((), None),  # type: ignore[arg-type]
        Plan((), "a fault", fault=ValueError("no text")),  # type: ignore[arg-type]
    ],
)
def test_nonsense_from_a_policy_is_a_fault(nonsense: Any) -> None:
    asked: list[Any] = []
    one = controller(Says(Plan((), "fine", "kept"), nonsense, Plan((), "fine")), lambda *a: asked.append(a))
    one.tick()
    assert one.tick() is None
    assert not asked
    assert "ConfigError" in one.health().faults[0].text
    assert one.tick() is not None
    assert one.policy.states[-1] == "kept"  # type: ignore[attr-defined]


def test_faults_are_kept_as_text_counted_and_bounded(caplog: pytest.LogCaptureFixture) -> None:
    one = controller(Says(*(ValueError(f"no {i // 2}") for i in range(2 * FAULTS_KEPT + 10)), Plan((), "fine")))
    for _ in range(2 * FAULTS_KEPT + 10):
        assert one.tick() is None
    faults = one.health().faults
    assert len(faults) == FAULTS_KEPT
    assert faults[-1].text == f"ValueError: no {FAULTS_KEPT + 4}"
    assert {fault.times for fault in faults} == {2}
    assert len(caplog.records) == FAULTS_KEPT + 5
    assert one.tick() is not None


def test_the_fault_of_one_of_several_policies_is_a_fault_beside_the_plan() -> None:
    asked: list[Any] = []
    one = controller(Says(Plan(SWAP, "pressure", fault="Own: ValueError: x")), lambda a, w: asked.append(a))
    assert one.tick()
    assert one.tick()
    assert asked == [SWAP, SWAP]
    assert [(fault.text, fault.times) for fault in one.health().faults] == [("Own: ValueError: x", 2)]


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
        (GeneratorExit(), "GeneratorExit: "),
        (Silent(), "Silent, whose text cannot be had"),
    ],
)
def test_nothing_that_a_policy_raises_ends_the_thread(error: BaseException, text: str) -> None:
    one = controller(Says(error, Plan((), "calm")))
    one.start()
    wait_until(lambda: one.health().last_reason == "calm" or not one.health().running)
    assert one.health().running
    assert [fault.text for fault in one.health().faults] == [text]
    one.stop()


def test_a_handler_of_logs_that_raises_ends_nothing_and_keeps_no_action_from_being_done() -> None:
    class Raises(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError(f"the disk is full: {record.getMessage()}")

    handler, acted = Raises(), []
    log = logging.getLogger("elastic.controller.loop")
    before = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        one = controller(Says(KeyError("a"), KeyError("b"), Plan(SWAP, "pressure")), lambda a, w: acted.append(a))
        one.start()
        wait_until(lambda: len(acted) > 2 or not one.health().running)
        running = one.health().running
        one.stop()
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
    assert running
    assert [fault.text for fault in one.health().faults] == ["KeyError: 'a'", "KeyError: 'b'"]


def test_a_policy_that_never_wants_to_be_asked_again_does_not_end_the_thread() -> None:
    one = Controller(lambda: SEEN, Says(Plan((), "calm")), lambda a, w: None, tick_s=2 * threading.TIMEOUT_MAX)
    one.start()
    wait_until(lambda: one.health().ticks == 1)
    time.sleep(0.05)
    assert one.health().running
    one.stop()


def test_a_tick_that_hangs_is_told_and_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    go = threading.Event()

    def sense() -> None:
        go.wait(20)

    one = controller(Says(Plan((), "calm")), sense=sense)
    assert one.health().in_tick_s is None
    one.start()
    wait_until(lambda: (one.health().in_tick_s or 0) > 0.01)
    one.stop(timeout_s=0.05)
    assert one.health().running
    assert "in its tick for 0 s and is left behind; its sensors or Says hang" in caplog.text
    go.set()
    one.stop()
    assert not one.health().running
    assert one.health().in_tick_s is None


def failing_future(error: BaseException) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def test_an_action_that_fails_is_a_fault_whether_at_once_or_later() -> None:
    def refuse(actions: Any, why: str) -> None:
        raise MemoryError("now")

    one = controller(Says(Plan(SWAP, "pressure")), refuse)
    one.tick()
    assert one.health().faults[0].text == "MemoryError: now"
    one = controller(Says(Plan(SWAP, "pressure"), Plan((), "calm")), lambda a, w: failing_future(OSError("later")))
    one.tick()
    assert one.health().faults == ()
    one.tick()
    assert one.health().faults[0].text == "OSError: later"
    cancelled: Future[Any] = Future()
    cancelled.cancel()
    one = controller(Says(Plan(SWAP, "pressure"), Plan((), "calm")), lambda a, w: cancelled)
    assert one.tick()
    assert one.tick()


def test_an_action_fails_behind_the_next_one() -> None:
    """A policy may act again before it is known what became of its last actions."""
    first: Future[Any] = Future()
    futures = [first, failing_future(OSError("second"))]
    one = controller(Says(Plan(SWAP, "a"), Plan(SWAP, "b"), Plan((), "calm")), lambda a, w: futures.pop(0))
    one.tick()
    one.tick()
    first.set_exception(OSError("first"))
    one.tick()
    assert [fault.text for fault in one.health().faults] == ["OSError: first", "OSError: second"]


class Heavy:
    """Stands for a tensor in a frame."""


def test_faults_keep_nothing_alive() -> None:
    """Errors know frames, and frames know tensors: the text is enough. Without the garbage collector's help."""
    alive: list[weakref.ref[Heavy]] = []

    def sense() -> Snapshot:
        heavy = Heavy()
        alive.append(weakref.ref(heavy))
        raise RuntimeError("sensor")

    def act(actions: Any, why: str) -> Future[Any]:
        heavy = Heavy()
        alive.append(weakref.ref(heavy))
        try:
            raise RuntimeError("action")
        except RuntimeError as error:
            return failing_future(error)

    gc.collect()
    gc.disable()
    try:
        one, two = (
            controller(Says(Plan((), "")), sense=sense),
            controller(Says(Plan(SWAP, "x"), Plan((), "y")), act),
        )
        for _ in range(3):
            one.tick()
            two.tick()
        assert len(one.health().faults) == len(two.health().faults) == 1
        assert [ref() for ref in alive] == [None] * 4
    finally:
        gc.enable()


def test_it_ends_when_what_it_watches_is_gone() -> None:
    one = controller(Says(Plan((), "calm")), sense=lambda: None)
    one.start()
    wait_until(lambda: not one.health().running)
    one.stop()


def test_a_controller_that_nobody_has_ends_its_thread() -> None:
    one = controller(Says(Plan((), "calm")))
    one.start()
    thread = one._thread
    assert thread is not None
    while one.health().ticks < 3:
        time.sleep(0.001)
    del one
    thread.join(30)
    assert not thread.is_alive()


def test_start_and_stop_come_in_pairs_any_number_of_times() -> None:
    one = controller(Says(Plan((), "calm")))
    one.stop()
    for _ in range(3):
        one.start()
        one.start()
        before = one.health().ticks
        wait_until(lambda before=before: one.health().ticks > before + 1)
        assert one.health().running
        one.stop()
        one.stop()
        assert not one.health().running
    ticks = one.health().ticks
    time.sleep(0.02)
    assert one.health().ticks == ticks


COMMON = """
    import threading, time
    from elastic.controller.decision import Plan
    from elastic.controller.snapshot import MemoryStats, RequestStats, Snapshot
    from elastic.controller.loop import Controller
    SEEN = Snapshot(0.0, RequestStats(), MemoryStats(1, 2, 2), ("a",))
    class Calm:
        def decide(self, snapshot, state):
            return Plan((), "calm")
"""


def child(code: str) -> str:
    import textwrap

    return in_fork(textwrap.dedent(COMMON) + textwrap.dedent(code)).strip()


@pytest.mark.slow
def test_races_of_start_stop_and_ticks_end() -> None:
    out = child("""
        one = Controller(lambda: SEEN, Calm(), lambda a, w: None, tick_s=0.0001)
        until = time.monotonic() + 1
        def race(work):
            while time.monotonic() < until:
                work()
        works = one.start, one.stop, one.tick, one.health, one.start, one.stop
        threads = [threading.Thread(target=race, args=(work,)) for work in works]
        [t.start() for t in threads]
        [t.join() for t in threads]
        one.stop()
        h = one.health()
        print(h.running, h.ticks > 10, h.faults)
    """)
    assert out == "False True ()"


@pytest.mark.slow
def test_stop_during_a_tick_waits_for_it_and_from_within_it_does_not() -> None:
    out = child("""
        inside, go = threading.Event(), threading.Event()
        def sense():
            inside.set()
            go.wait()
            return SEEN
        one = Controller(sense, Calm(), lambda a, w: None)
        one.start()
        inside.wait()
        one.stop(timeout_s=0.05)
        print(one.health().running)
        stopper = threading.Thread(target=one.stop)
        stopper.start()
        go.set()
        stopper.join()
        print(one.health().running)
        class Stops:
            def decide(self, snapshot, state):
                two.stop()
                return Plan((), "the end")
        two = Controller(lambda: SEEN, Stops(), lambda a, w: None, tick_s=0.001)
        two.start()
        two._thread.join()
        print(two.health().last_reason)
    """)
    assert out.split("\n") == ["True", "False", "the end"]


@pytest.mark.slow
def test_the_interpreter_ends_while_it_ticks() -> None:
    out = child("""
        import torch
        class Works:
            def decide(self, snapshot, state):
                torch.ones(100, 100) @ torch.ones(100, 100)
                return Plan((), "calm")
        all = [Controller(lambda: SEEN, Works(), lambda a, w: None, tick_s=0.0) for _ in range(4)]
        [one.start() for one in all]
        time.sleep(0.3)
        print("end")
    """)
    assert out == "end"


@pytest.mark.slow
def test_a_forked_child_has_no_controller_and_does_not_hang() -> None:
    out = child("""
        import os, warnings
        warnings.simplefilter("ignore")
        from elastic.errors import StateError
        one = Controller(lambda: SEEN, Calm(), lambda a, w: None, tick_s=0.0)
        one.start()
        for _ in range(5):
            pid = os.fork()
            if not pid:
                refused = 0
                for work in (one.tick, one.start):
                    try:
                        work()
                    except StateError:
                        refused += 1
                one.stop()
                os._exit(0 if refused == 2 and not one.health().running else 1)
            assert os.waitpid(pid, 0)[1] == 0
        print(one.health().running)
        one.stop()
    """)
    assert out == "True"


@pytest.mark.slow
def test_an_hour_of_ticks_costs_the_same_at_the_end_as_at_the_beginning() -> None:
    """18,000 ticks of 0.2 s under traffic: memory stays as it is, and so do the calls that a tick makes."""
    counters, now = RequestMetrics(), [0.0]
    layers = ["float32"] * 8

    def kv() -> MemoryStats:
        capacity = 1000 + 60 * layers.count("int4")
        return MemoryStats(min(capacity, 900 if now[0] % 60 < 20 else 300), capacity, capacity)

    def act(actions: Any, why: str) -> Future[Any]:
        done: Future[Any] = Future()
        for action in actions:
            for layer in action.layers:
                layers[layer] = getattr(action, "variant", "float32")
        done.set_exception(RuntimeError(f"{now[0] // 600}")) if now[0] % 7 < 1 else done.set_result(None)
        return done

    monitor = Monitor(
        counters,
        lambda: InstanceReadings(kv(), tuple(layers)),
        lambda: False,
        lambda: ((DeviceStats("cuda:0"),), HostStats()),
        lambda: now[0],
    )
    policy = PrecisionPolicy(Policy(), range(8), ("int4",), [LayerSize("float32", 100, {"int4": 40})] * 8)
    one = Controller(monitor.read, policy, act)

    def ticks(count: int) -> tuple[int, int]:
        """Calls in a tick at most, and blocks of memory after."""
        most = 0
        for i in range(count):
            now[0] += 0.2
            name = f"{now[0]:.1f}"
            counters.arrived(name, 10, now[0])
            counters.produced(name, 5, now[0])
            counters.ended(name, "completed", now[0])
            if i % 500 == 499:
                most = max(most, calls_of(one.tick))
            else:
                one.tick()
        gc.collect()
        return most, sys.getallocatedblocks()

    counters.arrived("one that stays", 10, 0.0)
    counters.produced("one that stays", 1, 0.0)
    ticks(500)
    first = ticks(2500)
    ticks(12_500)
    last = ticks(2500)
    assert one.health().actions > 100
    assert last[0] <= 1.1 * first[0]
    assert last[1] <= first[1] + 1500, "a block for every tenth tick; other threads of the process have some too"


def calls_of(work: Any) -> int:
    count = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += 1

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count
