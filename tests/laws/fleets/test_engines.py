from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from laws.fleets.engine_machine import EngineMachine


@pytest.mark.slow
def test_every_request_gets_its_tokens_whoever_computes_which_layer() -> None:
    run_state_machine_as_test(EngineMachine, settings=settings(max_examples=2, stateful_step_count=30, deadline=None))


@pytest.mark.long
def test_every_request_gets_its_tokens_for_thousands_of_flips() -> None:
    run_state_machine_as_test(EngineMachine, settings=settings(max_examples=400, stateful_step_count=60, deadline=None))
