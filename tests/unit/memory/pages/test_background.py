"""The janitor's thread: what waits already is called once, and what comes while it is called, again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest

from elastic.memory.pages.background import BackgroundThread


@pytest.fixture
def thread() -> Iterator[BackgroundThread]:
    background = BackgroundThread()
    yield background
    background.finish()


class Counted:
    """A task that says when it has begun, and waits until it may end."""

    def __init__(self) -> None:
        self.calls = 0
        self.began, self.may_end = threading.Semaphore(0), threading.Semaphore(0)

    def task(self) -> None:
        self.calls += 1
        self.began.release()
        assert self.may_end.acquire(timeout=60)


def test_a_task_that_waits_is_called_once(thread: BackgroundThread) -> None:
    counted, others = Counted(), Counted()
    for _ in range(5):
        thread.submit(counted.task)  # bound anew each time
    thread.submit(others.task)
    counted.may_end.release()
    others.may_end.release()
    thread.start()
    thread.finish()
    assert (counted.calls, others.calls) == (1, 1)


def test_a_task_that_is_submitted_while_it_is_called_is_called_again(thread: BackgroundThread) -> None:
    counted = Counted()
    thread.start()
    thread.submit(counted.task)
    assert counted.began.acquire(timeout=60)
    thread.submit(counted.task)
    for _ in range(2):
        counted.may_end.release()
    thread.finish()
    assert counted.calls == 2


def test_a_task_that_fails_may_be_submitted_again(thread: BackgroundThread) -> None:
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise RuntimeError("no")

    thread.submit(fail)
    thread.start()
    thread.finish()
    thread.start()
    thread.submit(fail)
    thread.finish()
    assert len(calls) == 2


def test_where_no_thread_can_start_a_task_beside_is_called_in_its_turn(
    thread: BackgroundThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    thread.start()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        thread.submit(partial(thread.run_beside, lambda: calls.append("beside")))
        thread.submit(lambda: calls.append("behind"))
        thread.finish()
    assert calls == ["beside", "behind"]


def test_what_is_done_beside_is_finished_too(thread: BackgroundThread) -> None:
    counted = Counted()
    thread.start()
    for _ in range(2):
        counted.may_end.release()
        thread.submit(partial(thread.run_beside, counted.task))
        assert counted.began.acquire(timeout=60)
    thread.finish()
    assert counted.calls == 2


def refuse(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
