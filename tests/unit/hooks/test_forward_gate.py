"""The safe point: readers together, one writer alone, nobody starves. Threads run in children with a timeout."""

from __future__ import annotations

import pytest

from elastic.errors import StateError
from elastic.hooks.forward_gate import ForwardGate
from support.child_process import in_fork


def test_a_thread_enters_once_and_leaves_with_its_outermost_module() -> None:
    gate = ForwardGate()
    assert gate.enter(1)
    assert not gate.enter(2)
    assert gate.inside
    assert not gate.leave(2)
    assert gate.leave(1)
    assert not gate.inside
    with gate.exclusive():
        pass


def test_a_forward_that_died_without_its_hooks_is_forgotten() -> None:
    gate = ForwardGate()
    gate.enter(1)
    gate.enter(2)  # Ctrl-C here: nobody leaves
    assert gate.enter(1)
    assert gate.leave(1)
    with gate.exclusive():
        pass


def test_leaving_the_outermost_leaves_what_it_contains() -> None:
    gate = ForwardGate()
    gate.enter(1)
    gate.enter(2)
    assert gate.leave(1)
    assert not gate.leave(2)
    assert not gate.inside


def test_a_commit_inside_a_forward_is_refused() -> None:
    gate = ForwardGate()
    gate.enter(1)
    with pytest.raises(StateError, match="wait=False"), gate.exclusive():
        pass
    gate.leave(1)


def test_a_refusal_reaches_every_forward() -> None:
    gate = ForwardGate()
    gate.refusal = "forked"
    with pytest.raises(StateError, match="forked"):
        gate.enter(1)
    assert not gate.leave(1)


def test_a_refusal_reaches_a_forward_that_waited_for_the_commit_that_said_it() -> None:
    told = in_fork("""
        import threading, time
        from elastic.errors import StateError
        from elastic.hooks.forward_gate import ForwardGate
        gate = ForwardGate()
        def read():
            try:
                gate.enter(1)
            except StateError as error:
                print(error)
        with gate.exclusive():
            thread = threading.Thread(target=read)
            thread.start()
            while not gate._queue: time.sleep(0.001)
            gate.refusal = "gone"
        thread.join()
        assert not gate._readers
        with gate.exclusive():
            print("free")
    """)
    assert told.split() == ["gone", "free"]


def test_daemon_threads_end_where_they_begin_a_forward_and_others_do_not() -> None:
    told = in_fork("""
        import threading, time
        from elastic.hooks.forward_gate import ForwardGate
        gate, left, go_on = ForwardGate(), threading.Semaphore(0), threading.Event()
        def compute():  # a pass, something else in torch, a pass
            gate.enter(1)
            gate.leave(1)
            left.release()
            go_on.wait()
            gate.enter(1)
            print("computes")
            gate.leave(1)
        daemon, other = (threading.Thread(target=compute, daemon=daemon) for daemon in (True, False))
        daemon.start()
        other.start()
        for _ in range(2): left.acquire()
        gate.LOOK_S = 10
        threading.Timer(0.05, go_on.set).start()  # while it is waited for
        gate.end_daemons(30)
        assert not daemon.is_alive()
        other.join()
    """)
    assert told.split() == ["computes"]


@pytest.mark.slow
def test_writers_exclude_readers_and_each_other_and_all_make_progress() -> None:
    out = in_fork("""
        import threading
        from elastic.hooks.forward_gate import ForwardGate
        gate, lock = ForwardGate(), threading.Lock()
        inside = {"readers": 0, "writers": 0}
        wrong, turns = [], {"read": [0] * 3, "write": [0] * 2}
        def read(index):
            for _ in range(300):
                gate.enter(7); gate.enter(8)
                with lock: inside["readers"] += 1
                if inside["writers"]: wrong.append("reader beside writer")
                turns["read"][index] += 1
                with lock: inside["readers"] -= 1
                gate.leave(8); gate.leave(7)
        def write(index):
            for _ in range(300):
                with gate.exclusive():
                    inside["writers"] += 1
                    if inside["readers"] or inside["writers"] > 1: wrong.append("writer not alone")
                    turns["write"][index] += 1
                    inside["writers"] -= 1
        threads = [threading.Thread(target=f, args=(i,)) for f, n in ((read, 3), (write, 2)) for i in range(n)]
        for t in threads: t.start()
        for t in threads: t.join()
        print(wrong, turns)
    """)
    assert out.strip() == str([]) + " " + str({"read": [300] * 3, "write": [300] * 2})


@pytest.mark.slow
def test_a_waiting_commit_goes_before_new_forwards_and_they_before_the_next_commit() -> None:
    out = in_fork("""
        import threading, time
        from elastic.hooks.forward_gate import ForwardGate
        gate, order = ForwardGate(), []
        def until(condition):
            while not condition(): time.sleep(0.001)
        def write(name):
            with gate.exclusive(): order.append(name)
        def read(name):
            gate.enter(1); order.append(name); gate.leave(1)
        gate.enter(1)
        threads = []
        def start(target, name, waiting):
            threads.append(threading.Thread(target=target, args=(name,)))
            threads[-1].start()
            until(waiting)
        start(write, "commit 1", lambda: gate._writers_waiting == 1)
        start(read, "forward", lambda: len(gate._queue) == 1)
        start(write, "commit 2", lambda: gate._writers_waiting == 2)
        gate.leave(1)
        for t in threads: t.join()
        print(order)
    """)
    first, second, third = eval(out)
    assert second == "forward"
    assert {first, third} == {"commit 1", "commit 2"}


def test_a_suspended_forward_lets_commits_pass_and_goes_on_behind_them() -> None:
    done = in_fork("""
        import threading
        from elastic.hooks.forward_gate import ForwardGate
        gate, order = ForwardGate(), []
        entered = threading.Event()

        def commit():
            with gate.exclusive():
                order.append("commit begins")
                entered.set()
                order.append("commit ends")

        gate.enter(1)
        thread = threading.Thread(target=commit)
        thread.start()
        with gate.suspended():
            assert gate.inside
            entered.wait()
        order.append("forward")
        assert gate.leave(1)
        thread.join()
        with gate.suspended():
            assert not gate.inside
        with gate.exclusive():
            print(order)
    """)
    assert done.strip() == str(["commit begins", "commit ends", "forward"])


def test_a_suspended_forward_that_fails_is_left_as_any_other() -> None:
    gate = ForwardGate()
    gate.enter(1)
    with pytest.raises(ValueError, match="lost"), gate.suspended():
        raise ValueError("lost")
    with pytest.raises(StateError, match="wait=False"), gate.exclusive():
        pass
    assert gate.leave(1)
    with gate.exclusive():
        pass
