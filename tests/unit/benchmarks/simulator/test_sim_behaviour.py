"""What a simulated run is held to besides figures: its actions, bubbles of stages, and steps of shared layers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from sim_behaviour import (
    LIMITS,
    Behaviour,
    above_limits,
    actions,
    bubble_share,
    differences,
    median_differences,
    most_off,
)
from sim_runs import OthersWork
from sim_served import FIGURES, SYSTEMS
from sim_validation import judged

from elastic.engines.pipeline.turn import StageTimes

DROPPED = ("dropped", 2.0)
RESTORED = ("restored", 9.0)


def test_events_that_change_nothing_and_such_outside_of_a_run_are_no_actions() -> None:
    events = [("resharded", -0.5), ("overloaded", 1.0), DROPPED, ("joined", 3.0), RESTORED]
    assert actions(events, 8.0) == (DROPPED,)


@pytest.mark.parametrize(
    ("told", "off"),
    [
        ((DROPPED, RESTORED), 0),
        ((DROPPED,), 1),
        ((DROPPED, RESTORED, ("dropped", 11.0), ("restored", 12.0)), 2),
        ((DROPPED, ("moved", 9.0)), 1),  # another one in its place
        ((), 2),
    ],
)
def test_actions_are_off_by_those_that_are_missing_or_too_many(told: tuple[tuple[str, float], ...], off: int) -> None:
    found = differences(Behaviour((DROPPED, RESTORED)), Behaviour(told))["actions"]
    assert found == off
    assert above_limits({"actions": found}) == (["actions"] if off > 1 else [])


def test_times_are_compared_of_actions_of_a_kind_and_the_furthest_counts() -> None:
    real = Behaviour((DROPPED, RESTORED, ("dropped", 12.0)))
    told = Behaviour((("restored", 9.5), ("dropped", 2.25), ("dropped", 10.5)))
    assert differences(real, told)["action_s"] == 1.5
    assert "action_s" not in differences(real, Behaviour((("moved", 1.0),)))


def test_bubbles_are_off_by_points_and_steps_by_shares_where_the_real_run_has_them() -> None:
    found = differences(Behaviour((), 0.20, 0.010), Behaviour((), 0.25, 0.011))
    assert found == {"actions": 0.0, "bubbles": pytest.approx(0.05), "shared_step": pytest.approx(0.1)}
    assert differences(Behaviour(), Behaviour((), 0.25, 0.011)) == {"actions": 0.0}
    assert differences(Behaviour((), 0.2, 0.01), Behaviour())["shared_step"] == 1.0  # a simulator that shares nothing


def test_bubbles_are_those_of_all_stages_over_the_time_in_which_they_had_steps() -> None:
    assert bubble_share([StageTimes(3.0, 1.0), StageTimes(2.0, 2.0)]) == 3 / 8
    assert bubble_share([]) is None


def test_of_runs_with_other_noise_the_median_counts() -> None:
    told = [Behaviour((("dropped", at_s),)) for at_s in (2.25, 3.0, 7.0)] + [Behaviour()]
    assert median_differences(Behaviour((DROPPED,)), told) == {"actions": 0.0, "action_s": 1.0}


@pytest.mark.parametrize(("name", "most"), LIMITS.items())
def test_one_run_that_is_further_off_than_it_may_be_is_a_miss_of_whichever_simulator_it_is(
    name: str, most: float
) -> None:
    def run(simulated: float, null: float) -> dict[str, object]:
        figures = dict.fromkeys(FIGURES, 1.0)
        off = {"simulated": {name: simulated}, "null": {name: null}}
        about = {"system": "drop", "load": "conv", "memory": "tight"}
        return {**about, "real": figures, "simulated": figures, "null": figures, "off": off}

    runs = [run(most, 0.0), run(0.0, 1.1 * most)]
    assert judged(runs, "simulated")["missed"] == []
    assert judged(runs, "null")["missed"] == [name]
    assert most_off([{}, {name: most}]) == {name: most}


def test_there_are_runs_with_faults_with_stages_and_with_shared_layers() -> None:
    killed = [system for system in SYSTEMS.values() if system.kill is not None]
    assert len(killed) >= 2
    assert {system.alone for system in killed} == {True, False}
    assert any(system.stages == 2 for system in SYSTEMS.values())


def test_what_a_process_computed_that_was_killed_is_not_others_work() -> None:
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    others = OthersWork([os.getpid(), spinning.pid])
    while others._own[spinning.pid] < 10:
        others.look()
    before = others._own[spinning.pid]
    spinning.kill()
    spinning.wait()
    others.look()
    assert others._own[spinning.pid] >= before
