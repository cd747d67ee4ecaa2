from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from laws.scheduler_machine import PagedMachine, SchedulerMachine, SlidingMachine, TwoShapesMachine, UnsharedMachine

MACHINES = pytest.mark.parametrize(
    "machine", [SchedulerMachine, PagedMachine, UnsharedMachine, SlidingMachine, TwoShapesMachine]
)


@MACHINES
def test_every_sequence_ends_as_it_would_alone_whatever_happens(machine: type[SchedulerMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=12, stateful_step_count=40, deadline=None))


@pytest.mark.long
@MACHINES
def test_every_sequence_ends_as_it_would_alone_for_ten_thousand_steps(machine: type[SchedulerMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=200, stateful_step_count=50, deadline=None))
