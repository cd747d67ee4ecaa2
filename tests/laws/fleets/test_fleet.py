from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from elastic.memory.backends.memfd import MemfdBackend
from laws.fleets.fleet_machine import FleetMachine


@pytest.mark.slow
def test_every_request_gets_its_tokens_once_whatever_happens_to_ranks() -> None:
    run_state_machine_as_test(FleetMachine, settings=settings(max_examples=4, stateful_step_count=15, deadline=None))


@pytest.mark.slow
def test_every_request_gets_its_tokens_once_where_ranks_find_no_memory_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs and other hosts: what moves is read over connections, and what a lost rank had is lost."""
    monkeypatch.setattr(MemfdBackend, "shared_file", lambda backend: None)
    run_state_machine_as_test(FleetMachine, settings=settings(max_examples=3, stateful_step_count=15, deadline=None))


@pytest.mark.long
def test_every_request_gets_its_tokens_once_for_thousands_of_steps() -> None:
    run_state_machine_as_test(FleetMachine, settings=settings(max_examples=200, stateful_step_count=40, deadline=None))
