from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from laws.fleets.group_machine import GroupMachine
from laws.fleets.sharded_machine import ShardedMachine


@pytest.mark.slow
def test_every_request_gets_its_tokens_once_whatever_instances_drop() -> None:
    run_state_machine_as_test(GroupMachine, settings=settings(max_examples=4, stateful_step_count=15, deadline=None))


@pytest.mark.long
def test_every_request_gets_its_tokens_once_for_thousands_of_steps_of_groups() -> None:
    run_state_machine_as_test(GroupMachine, settings=settings(max_examples=200, stateful_step_count=40, deadline=None))


@pytest.mark.slow
def test_every_request_gets_its_tokens_once_whatever_instances_share() -> None:
    run_state_machine_as_test(ShardedMachine, settings=settings(max_examples=4, stateful_step_count=12, deadline=None))


@pytest.mark.long
def test_every_request_gets_its_tokens_once_for_thousands_of_steps_of_shared_layers() -> None:
    run_state_machine_as_test(
        ShardedMachine, settings=settings(max_examples=200, stateful_step_count=40, deadline=None)
    )
