"""What ranks of one host do to each other, measured by two processes."""

from __future__ import annotations

import os

import pytest

from elastic.cluster.peers.link_profile import (
    BURST,
    _Exchanges,
    line_through,
    measure_contention,
    measure_link,
)
from elastic.errors import StateError
from support.child_process import in_fork


def test_the_line_goes_through_the_fewest_and_the_most_bytes() -> None:
    line = line_through({100: 3.0, 200: 9.0, 1100: 8.0})
    assert line.fixed_s + 100 * line.each_s == pytest.approx(3.0)
    assert line.fixed_s + 1100 * line.each_s == pytest.approx(8.0)


def test_no_part_of_it_is_below_zero() -> None:
    assert line_through({100: 3.0, 200: 1.0}).each_s == 0.0
    assert line_through({100: 1.0, 200: 9.0}).fixed_s == 0.0


def test_whoever_has_rested_meets_the_other_one_before_it_is_timed() -> None:
    class Transport:
        def send(self, *_: object) -> None:
            told.append("exchange")

        def receive(self, *_: object) -> None: ...
        def forget(self, step: int) -> None: ...

    told: list[str] = []
    exchanges = _Exchanges(Transport(), "other")  # type: ignore[arg-type]
    taken = exchanges.measure(1024, BURST + 1, lambda seconds: told.append("rest"))
    assert len(taken) == 2 * BURST
    assert told == [*["exchange"] * (BURST + 2), "rest"] * 2


def test_one_core_tells_nothing_of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    for measure in (measure_link, measure_contention):
        with pytest.raises(StateError, match="one core alone"):
            measure()


FORKS = """
import multiprocessing, os
from elastic.cluster.peers import link_profile
from elastic.errors import StateError

context = multiprocessing.get_context("fork")
link_profile.multiprocessing.get_context = lambda _: context
"""
"""In a process by itself the other one is a fork of it; a guest's is a new interpreter (`fleet/profiling`)."""


@pytest.mark.slow
def test_the_end_of_the_other_process_is_an_error_in_words() -> None:
    code = """
link_profile.two_cores = lambda: (min(os.sched_getaffinity(0)), 1 << 15)
try:
    link_profile.measure_link()
except StateError as error:
    print(error)
"""
    assert f"core {1 << 15} ended with 1" in in_fork(FORKS + code)


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need a core each")
def test_two_processes_measure_and_leave_this_one_as_it_was() -> None:
    code = """
link_profile.READ_BYTES = 8 << 20
cores = os.sched_getaffinity(0)
link, contention = link_profile.measure_link(repeats=3), link_profile.measure_contention(rounds=1)
assert link.fixed_s + link.each_s > 0
assert contention >= 0
assert os.sched_getaffinity(0) == cores
print("measured")
"""
    assert in_fork(FORKS + code) == "measured\n"
