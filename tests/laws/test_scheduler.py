from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from laws.scheduler_machine import SchedulerMachine


def test_every_sequence_ends_as_it_would_alone_whatever_happens() -> None:
    run_state_machine_as_test(
        SchedulerMachine, settings=settings(max_examples=100, stateful_step_count=40, deadline=None)
    )


@pytest.mark.long
def test_every_sequence_ends_as_it_would_alone_for_ten_thousand_steps() -> None:
    run_state_machine_as_test(
        SchedulerMachine, settings=settings(max_examples=200, stateful_step_count=50, deadline=None)
    )
