from __future__ import annotations

import threading

import pytest

from elastic.engines.pipeline.step_threads import StepThreads


def test_work_is_done_by_the_threads_that_there_are_after_a_resize() -> None:
    pool = StepThreads()
    for count in (2, 1, 3) * 50:  # an old thread that lives on in the place of a new one would do some of it
        pool.resize(count)
        assert pool.submit(threading.current_thread).result(10) in pool.started
    last = pool.started
    pool.resize(0)
    for thread in last:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize("left", [0, 1])
def test_work_is_done_by_as_many_threads_as_can_be_had(monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    """Ranks have been told of the path by then: steps that nobody computed would be waited for without end."""
    start, started = threading.Thread.start, list[threading.Thread]()

    def scarce(thread: threading.Thread) -> None:
        if len(started) == left:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    pool = StepThreads()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", scarce)
        pool.resize(2)
    computed = [pool.submit(threading.current_thread).result(10) for _ in range(3)]
    assert computed == [*started, threading.current_thread()][:1] * 3
    pool.resize(0)
