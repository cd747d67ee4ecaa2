"""The regret of a choice of configurations, as the benchmark of deployments has it."""

from __future__ import annotations

import pytest
from deploy import regret_of

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
