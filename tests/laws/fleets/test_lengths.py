from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from laws.fleets.length_machine import MOST, LengthMachine


@pytest.mark.slow
def test_a_request_that_its_home_cannot_hold_alone_any_more_goes_to_others_that_can_together() -> None:
    """One of the two ranks that share layers for it is lost: its home failed it, though two are left that hold it."""
    machine = LengthMachine()
    machine.begin(name="llama-mha", ranks=3, most=None)
    try:
        machine.submit_long(answer=MOST, degree=2, share=1.0)
        machine.go_on_until_tokens_came(0, 1)
        home, (group,) = machine.fleet.instance_of("request-0"), machine.fleet.groups()
        machine.kill(next(n for n, rank in enumerate(machine.ranks) if rank != home and rank in group.members))
    finally:
        machine.teardown()
    assert machine.heard.ends["request-0"].finish == "length"


@pytest.mark.slow
def test_requests_go_on_when_a_limit_is_raised_that_was_lowered_while_ranks_share_layers() -> None:
    """What the ranks could hold is measured again then, although the group has as many blocks as before."""
    machine = LengthMachine()
    machine.begin(name="llama-mha", ranks=2, most=None)
    try:
        machine.submit_long(answer=3, degree=2, share=0.3)
        machine.tick(ticks=1)
        machine.resize(number=0, pages=9)
        machine.submit_several(lengths=[36, 34, 17])
        machine.tick(ticks=3)
    finally:
        machine.teardown()
    assert len(machine.heard.ends) == 4


@pytest.mark.slow
def test_whoever_ranks_can_hold_together_ends_whatever_the_policy_of_lengths_does() -> None:
    run_state_machine_as_test(LengthMachine, settings=settings(max_examples=4, stateful_step_count=12, deadline=None))


@pytest.mark.long
def test_whoever_ranks_can_hold_together_ends_for_thousands_of_steps_of_the_policy_of_lengths() -> None:
    run_state_machine_as_test(LengthMachine, settings=settings(max_examples=200, stateful_step_count=40, deadline=None))
