"""The turn to compute goes round: first come, first served, and nobody keeps it while waiting."""

from __future__ import annotations

import threading
import time

import pytest

from elastic.engines.pipeline.turn import StageTimes, Turn
from elastic.errors import StateError
from support.child_process import in_fork


def queue_up(turn: Turn, name: str, order: list[str], behind: int) -> threading.Thread:
    """A thread that waits for the turn as the one after so many."""

    def take() -> None:
        with turn:
            order.append(name)

    thread = threading.Thread(target=take)
    thread.start()
    while len(turn._waiting) <= behind:
        time.sleep(0.001)
    return thread


def test_who_has_waited_longest_is_next() -> None:
    turn, order = Turn(), list[str]()
    with turn:
        threads = [queue_up(turn, name, order, behind) for behind, name in enumerate("abc")]
    for thread in threads:
        thread.join(10)
    assert order == ["a", "b", "c"]


def test_who_gives_it_up_goes_behind_those_that_wait() -> None:
    turn, order = Turn(), list[str]()
    with turn:
        threads = [queue_up(turn, name, order, behind) for behind, name in enumerate("ab")]
        with turn.given_up():
            assert not turn.mine
        assert turn.mine
        order.append("the first again")
    for thread in threads:
        thread.join(10)
    assert order == ["a", "b", "the first again"]


def test_the_turn_is_had_again_behind_a_wait_that_failed() -> None:
    turn = Turn()
    with turn:
        with pytest.raises(ValueError, match="lost"), turn.given_up():
            raise ValueError("lost")
        assert turn.mine
    assert not turn.mine
    with turn:
        pass


def test_a_thread_does_not_wait_for_itself() -> None:
    turn = Turn()
    with turn, pytest.raises(StateError, match="already"), turn:
        pass
    with pytest.raises(StateError, match="does not have"), turn.given_up():
        pass


@pytest.mark.slow
def test_one_at_a_time_and_all_make_progress() -> None:
    done = in_fork("""
        import threading
        from elastic.engines.pipeline.turn import Turn
        turn, inside, counts = Turn(), [], [0] * 4

        def work(index):
            for _ in range(500):
                with turn:
                    inside.append(index)
                    assert inside == [index]
                    inside.remove(index)
                    with turn.given_up():
                        pass
                    counts[index] += 1

        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(counts)
    """)
    assert done.strip() == str([500] * 4)


def test_who_does_other_work_learns_when_nobody_computes() -> None:
    turn, order = Turn(), list[str]()
    assert turn.wait_idle(0)
    assert turn.stage_s == 0
    with turn:
        threads = [queue_up(turn, "a", order, 0)]
        assert not turn.wait_idle(0.001)
        waiting = threading.Thread(target=lambda: order.append(f"idle {turn.wait_idle(10)}"))
        waiting.start()
    for thread in (*threads, waiting):
        thread.join(10)
    assert order == ["a", "idle True"]
    assert 0 < turn.stage_s < 10


def test_who_waits_for_hidden_states_does_not_compute() -> None:
    turn = Turn()
    with turn, turn.given_up():
        assert turn.wait_idle(0)


class Clock:
    """Stands in for `time` in the module of the turn: seconds pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


def test_a_rank_is_busy_or_in_a_bubble_or_has_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("elastic.engines.pipeline.turn.time", clock)
    turn = Turn()
    clock.now_s += 7  # no step yet
    with turn:
        clock.now_s += 1
        with turn.given_up():
            clock.now_s += 2  # a bubble: the only step waits
        clock.now_s += 4
    clock.now_s += 8
    assert turn.times == StageTimes(busy_s=5.0, bubble_s=2.0, waiting_s=2.0, load=5 / 22)


def test_while_another_step_computes_one_that_waits_is_no_bubble(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("elastic.engines.pipeline.turn.time", clock)
    turn = Turn()

    def compute() -> None:
        with turn:
            clock.now_s += 3

    with turn, turn.given_up():
        clock.now_s += 1
        other = threading.Thread(target=compute)
        other.start()
        other.join(10)
        clock.now_s += 1
        now = StageTimes(busy_s=3.0, bubble_s=2.0, waiting_s=5.0, load=3 / 5)
        assert turn.times == now, "as of now, the step still waits"
    assert turn.times == now


def test_who_expects_a_step_is_in_a_bubble_where_nobody_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("elastic.engines.pipeline.turn.time", clock)
    turn = Turn()
    with turn.step_expected():
        clock.now_s += 3
        assert turn.times == StageTimes(bubble_s=3.0), "as of now, no step has come"
        with turn:
            clock.now_s += 4  # of another instance
            with turn.given_up():
                clock.now_s += 1  # counted once
    clock.now_s += 5
    assert turn.times == StageTimes(busy_s=4.0, bubble_s=4.0, waiting_s=1.0, load=4 / 13)


def test_a_wait_that_failed_is_counted_and_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("elastic.engines.pipeline.turn.time", clock)
    turn = Turn()

    def lose() -> None:
        clock.now_s += 1
        raise ValueError("lost")

    with turn, pytest.raises(ValueError, match="lost"), turn.given_up():
        lose()
    clock.now_s += 5
    assert turn.times == StageTimes(bubble_s=1.0, waiting_s=1.0)
