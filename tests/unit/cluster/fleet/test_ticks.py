"""What a fleet does again and again goes on whatever is raised in it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import pytest

from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.ticks import Attempts, TickThread
from elastic.errors import RankLost, StateError
from support.cluster.fake_rank import FakeLauncher, FakeRank
from support.processes import wait_until


def raising(errors: Iterator[Exception | None]) -> Callable[[], None]:
    """Something that raises these in turn, and nothing for None."""

    def act() -> None:
        error = next(errors)
        if error is not None:
            raise error

    return act


def test_each_fault_is_told_once_in_a_row_and_a_bug_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    lost, bug = RankLost("r1 is lost", rank="r1"), KeyError("r1")
    act = raising(iter([lost, lost, bug, bug, None, bug, lost]))
    attempts = Attempts("it could not act")
    for _ in range(7):
        attempts.attempt(act)
    told = [(record.levelno, record.getMessage(), record.exc_info is not None) for record in caplog.records]
    usual = (logging.WARNING, "it could not act: r1 is lost", False)
    unusual = (logging.ERROR, "it could not act; it goes on", True)
    assert told == [usual, unusual, unusual, usual]


@pytest.mark.parametrize("error", [StateError("no room"), KeyError("r1"), AssertionError()])
def test_the_next_tick_comes_behind_any_error(error: Exception) -> None:
    acted, again = list[int](), threading.Event()

    def act() -> None:
        acted.append(1)
        if len(acted) == 1:
            raise error
        again.set()

    thread = TickThread(act, 0.001, "test", "it could not act")
    thread.start()
    assert again.wait(30)
    thread.stop()
    thread.stop()


@pytest.mark.parametrize("policy", [None, "balance"])
def test_caps_and_moves_are_looked_at_again_behind_a_bug(policy: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic.cluster.fleet.policy_threads.TICK_S", 0.001)
    launcher = FakeLauncher(lambda spec: FakeRank(spec.name))
    looked: list[int] = []

    def fails(*_: object) -> None:
        looked.append(1)
        raise KeyError("r1")

    where = "groups.groups.Groups.follow_needs" if policy is None else "balancer.Balancer.next_move"
    monkeypatch.setattr(f"elastic.cluster.fleet.{where}", fails)
    fleet = Fleet("no model", ranks=1, launch=launcher, policy=policy, beat_timeout_s=1e6)  # type: ignore[arg-type]
    with fleet:
        wait_until(lambda: len(looked) >= 2, "the thread has ended")
