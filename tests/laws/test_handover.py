from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from laws.handover_machine import Handover


@pytest.mark.slow
def test_requests_that_move_get_the_tokens_of_one_undisturbed_engine() -> None:
    run_state_machine_as_test(Handover, settings=settings(max_examples=6, stateful_step_count=20, deadline=None))


@pytest.mark.long
def test_requests_that_move_get_the_tokens_of_one_undisturbed_engine_for_thousands_of_steps() -> None:
    run_state_machine_as_test(Handover, settings=settings(max_examples=150, stateful_step_count=40, deadline=None))
