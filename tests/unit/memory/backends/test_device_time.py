"""A race of several ways to do one thing: others that compute meanwhile do not decide it."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.memory.backends import device_time
from elastic.memory.backends.device_time import RACE_MOST_S, RACE_S, RACE_TURNS, race, time_ratio

CPU = torch.device("cpu")
SLICE_S = 0.004
"""Of time that another process has the processor."""


class Machine:
    """A clock that ways move on by their seconds, and that stands at `busy` times in another process's hands."""

    def __init__(self, seconds: dict[str, float], busy: Callable[[float], bool] = lambda now: False) -> None:
        self.now_s, self.turns = 0.0, dict.fromkeys(seconds, 0)
        self.ways = {name: lambda name=name: self._compute(name) for name in seconds}
        self._seconds, self._busy = seconds, busy

    def _compute(self, name: str) -> None:
        self.turns[name] += 1
        self.now_s += self._seconds[name]
        while self._busy(self.now_s):
            self.now_s += SLICE_S

    def race(self, lower_bounds: dict[str, float] | None = None) -> dict[str, float]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device_time.time, "perf_counter", lambda: self.now_s)
            return race(self.ways, CPU, lower_bounds=lower_bounds)


def test_short_work_has_many_turns_and_long_work_few() -> None:
    machine = Machine({"quick": 2e-5, "slower": 2.5e-5, "slow": 1e-2, "long": 1.0})
    assert machine.race() == pytest.approx({"quick": 2e-5, "slower": 2.5e-5, "slow": 1e-2, "long": 1.0})
    assert machine.turns == {"quick": RACE_TURNS, "slower": RACE_TURNS, "slow": 2, "long": 2}
    middling = Machine({"a": RACE_S / 9.5, "b": RACE_S / 11.5})
    middling.race()
    assert middling.turns == {"a": 10, "b": 12}


def test_long_work_has_two_turns() -> None:
    machine = Machine({"a": RACE_MOST_S, "b": RACE_MOST_S / 1.2})
    machine.race()
    assert machine.turns == {"a": 2, "b": 2}


def test_a_way_that_cannot_win_has_no_turn() -> None:
    machine = Machine({"a": 1e-3, "b": 2e-3, "c": 3e-3})
    assert machine.race({"a": 1e-3, "b": 1.5e-3, "c": 1.1e-3}).keys() == {"a", "c"}
    assert machine.turns["b"] == 0


@given(st.sampled_from(["quick", "slow"]), st.integers(0, 3), st.integers(2, 5))
def test_the_fastest_wins_beside_processes_that_take_turns_with_it(first: str, phase: int, of: int) -> None:
    """Another process has the machine for one slice of `of`; ten turns of either way fit into the time between."""
    seconds = {first: 0.0} | {"quick": 2e-5, "slow": 3e-5}
    machine = Machine(seconds, lambda now: int(now / SLICE_S + phase) % of == 0)
    assert machine.race() == pytest.approx({"quick": 2e-5, "slow": 3e-5})


def test_one_quick_turn_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a product with a matrix that is still in a cache is."""
    turns = itertools.count()
    works: list[Callable[[], object]] = [lambda: None, lambda: None]

    def seconds(work: object, device: torch.device) -> float:
        return 0.1 if next(turns) % 30 == 0 else {works[0]: 1.0, works[1]: 2.0}[work]  # type: ignore[index]

    monkeypatch.setattr(device_time, "seconds_of", seconds)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert time_ratio(works[0], works[1], CPU, 15) == 0.5


@pytest.mark.parametrize(("together", "expected"), [((0.6, 0.5), 1.2), ((100.0, 3.0), 0.75)])
def test_where_others_compute_the_times_of_one_thread_decide(
    together: tuple[float, float], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several threads that take longer than one wait for a processor."""
    works: list[Callable[[], object]] = [lambda: None, lambda: None]
    alone, shared = [0.9, 1.2], 0

    def seconds(work: Callable[[], object], device: torch.device) -> float:
        nonlocal shared
        if torch.get_num_threads() == 1:
            return alone[works.index(work)]
        shared += 1
        return together[works.index(work)]

    monkeypatch.setattr(device_time, "seconds_of", seconds)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert time_ratio(works[0], works[1], CPU, 15) == pytest.approx(expected)
    finally:
        torch.set_num_threads(threads)
    assert shared == (30 if expected == 1.2 else 6)
