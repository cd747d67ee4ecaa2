from __future__ import annotations

import threading

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
