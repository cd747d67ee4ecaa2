"""The regret of a choice of configurations, as the benchmark of deployments has it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from deploy import regret_of, told
from deploy_served import lateness, share_below

from elastic.cluster.deployment.status import Replanned, TransitionStep
from elastic.planning.estimate.configuration import Configuration

FULL, INT8, TWO = Configuration(), Configuration(weights="int8"), Configuration(2)


def test_regret_is_that_of_rounds_whatever_the_pace_of_the_machine_in_each() -> None:
    paces = (1.0, 3.0, 1.5)
    metrics = {each: [seconds * pace for pace in paces] for each, seconds in ((FULL, 1.0), (INT8, 1.1), (TWO, 2.0))}
    assert regret_of(FULL, metrics) == (FULL, 0.0)
    assert regret_of(INT8, metrics) == (FULL, pytest.approx(0.1))


def test_one_disturbed_round_is_no_regret_and_another_best_is() -> None:
    metrics = {FULL: [1.0, 1.0, 9.0], INT8: [1.2, 1.2, 1.2]}
    assert regret_of(FULL, metrics) == (FULL, 0.0)
    assert regret_of(INT8, metrics) == (FULL, pytest.approx(0.2))


def test_regrets_are_counted_over_models_and_distinct_choices_within_one() -> None:
    def rows(chosen: str, regrets: list[float]) -> list[dict[str, object]]:
        return [{"chosen": name, "regret": regret} for name, regret in zip(chosen, regrets, strict=True)]

    counted = told({"one": rows("aabb", [0.0, 0.05, 0.06, 0.0]), "other": rows("cdef", [0.0, 0.0, 0.0, 0.3])})
    assert counted == {"regrets": 6 / 8, "distinct": 4}


def test_a_change_may_take_one_action_longer_than_was_planned() -> None:
    steps = (TransitionStep("add", ("a",), seconds=3.0), TransitionStep("share", ("a", "b"), seconds=1.0))
    planned = Replanned("planned", "TP1 PP1 full", "TP2 PP1 full", steps, seconds=4.0)
    changes = [(planned, replace(planned, status="applied", seconds=seconds)) for seconds in (2.0, 7.0, 7.5)]
    unchanged = planned, replace(planned, status="unchanged", seconds=99.0)
    told_of = lateness([*changes, unchanged])
    assert (told_of["changes"], told_of["change_s"], told_of["longest_s"]) == (3, 7.0, 7.5)
    assert told_of["within one action"] == pytest.approx(2 / 3)
    assert lateness([unchanged]) == {"changes": 0}


def test_an_objective_is_kept_by_what_takes_no_longer() -> None:
    assert share_below([1.0, 2.5, 2.6, 9.0], 2.5) == 0.5
