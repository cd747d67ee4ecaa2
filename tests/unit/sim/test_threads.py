"""Threads of a simulation: they wait for each other and for time as those of a process do, and take none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elastic import clock
from elastic.errors import StateError
from elastic.sim.core.clock import VirtualClock
from elastic.sim.core.threads import SimulatedFuture, SimulatedThreads


@pytest.fixture
def threads() -> Iterator[SimulatedThreads]:
    made = SimulatedThreads(VirtualClock())
    yield made
    made.close()


def begin(threads: SimulatedThreads, *works: Callable[[], object]) -> None:
    for number, work in enumerate(works):
        threads.thread(work, f"t{number}").start()
    threads.run()


def test_threads_sleep_side_by_side_and_know_what_time_it_is(threads: SimulatedThreads) -> None:
    seen: list[tuple[str, float]] = []

    def work(name: str, seconds: float) -> None:
        for _ in range(2):
            clock.sleep(seconds)
            seen.append((name, clock.now()))

    begin(threads, lambda: work("a", 10.0), lambda: work("b", 15.0))
    assert seen == [("a", 10.0), ("b", 15.0), ("a", 20.0), ("b", 30.0)]
    assert not threads.started


def test_a_lock_is_had_by_one_at_a_time_in_order(threads: SimulatedThreads) -> None:
    lock, seen = threads.lock(), []

    def work(name: str) -> None:
        with lock:
            seen.append(name)
            clock.sleep(1.0)

    begin(threads, lambda: work("a"), lambda: work("b"), lambda: work("c"), lambda: seen.append(lock.acquire(False)))
    assert seen == ["a", False, "b", "c"]
    assert threads.now() == 3.0
    assert not lock.locked()


def test_events_conditions_queues_and_futures_wake_who_waits(threads: SimulatedThreads) -> None:
    event, items, lock, future = threads.event(), threads.queue(), threads.lock(), SimulatedFuture(threads)
    condition, seen, ready = threads.condition(lock), list[Any](), list[int]()

    def waits() -> None:
        seen.append(event.wait(0.5))
        seen.append(event.wait())
        seen.append(items.get())
        with lock:
            seen.append(condition.wait_for(lambda: tuple(ready), 0.25))
            seen.append(condition.wait_for(lambda: tuple(ready)))
        seen.append(future.result())
        seen.append(clock.now())

    def wakes() -> None:
        clock.sleep(1.0)
        event.set()
        clock.sleep(1.0)
        items.put("item")
        clock.sleep(1.0)
        with lock:
            ready.append(7)
            condition.notify_all()
        future.set_result("future")

    begin(threads, waits, wakes)
    assert seen == [False, True, "item", (), (7,), "future", 3.0]


def test_a_result_that_comes_too_late_is_a_timeout(threads: SimulatedThreads) -> None:
    def work() -> None:
        with pytest.raises(TimeoutError):
            SimulatedFuture(threads).result(2.0)

    begin(threads, work)
    assert threads.now() == 2.0


def test_calls_run_together_and_what_each_raises_is_its_own(threads: SimulatedThreads) -> None:
    found: list[Any] = []

    def slow(seconds: float) -> float:
        clock.sleep(seconds)
        return 1 / seconds

    def work() -> None:
        futures = clock.current().run_together([lambda: slow(1.0), lambda: slow(0.0), lambda: slow(2.0)], "call")
        found.extend(future.exception() or future.result() for future in futures)

    begin(threads, work)
    assert [type(one) for one in found] == [float, ZeroDivisionError, float]
    assert threads.now() == 2.0


def test_what_a_thread_raises_ends_the_simulation(threads: SimulatedThreads) -> None:
    with pytest.raises(ZeroDivisionError):
        begin(threads, lambda: 1 / 0)


def test_an_event_cannot_wait(threads: SimulatedThreads) -> None:
    threads.events.after(1.0, lambda: threads.sleep(1.0))
    with pytest.raises(StateError, match="cannot wait"):
        threads.run()


def test_threads_that_wait_end_with_the_simulation() -> None:
    before = threading.active_count()
    threads = SimulatedThreads(VirtualClock())
    ended: list[str] = []

    def work() -> None:
        try:
            threads.event().wait()
        finally:
            ended.append("event")
            clock.sleep(1.0)
            ended.append("never")

    begin(threads, work, lambda: threads.queue().get())
    assert len(threads.started) == 2
    threads.close()
    threads.close()
    assert (ended, threading.active_count()) == (["event"], before)
