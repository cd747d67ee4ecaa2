"""The load of a rank is what it computed in the last two minutes, whatever it did before."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.engines.pipeline.busy_window import WINDOW_S, BusyWindow
from elastic.engines.pipeline.turn import Turn

intervals = st.lists(st.tuples(st.floats(0, 200), st.floats(0, 200)), max_size=12)


@given(began=st.floats(0, 5), steps=intervals, more=st.floats(0, 300))
def test_what_was_busy_within_the_window_is_counted_once(
    began: float, steps: list[tuple[float, float]], more: float
) -> None:
    """Against the overlap of every interval with the window, whose first second is a whole one."""
    window, now, busy = BusyWindow(began), began, list[tuple[float, float]]()
    for idle, length in steps:
        begin, now = now + idle, now + idle + length
        window.add(begin, now)
        busy.append((begin, now))
    now += more
    first = max(began, now // 1 - WINDOW_S + 1)
    counted = sum(max(0.0, end - max(begin, first)) for begin, end in busy)
    assert window.share(now) == pytest.approx(min(1.0, counted / (now - first)) if now > first else 0.0, abs=1e-6)


def test_a_turn_that_is_held_is_load() -> None:
    turn = Turn()
    assert turn.times.load == 0.0
    with turn:
        time.sleep(0.02)
        held = turn.times
    assert 0 < held.load <= 1
    assert held.busy_s >= 0.02
    time.sleep(0.02)
    assert turn.times.load < held.load
