from __future__ import annotations

from pathlib import Path

import pytest

from laws.machine_process import run_machine

MACHINE = Path(__file__).with_name("controller_machine.py")


def test_the_laws_hold_under_controllers() -> None:
    run_machine(MACHINE, "--examples", "6", "--steps", "30", "--least", "1", timeout=300)


@pytest.mark.long
def test_the_laws_hold_under_controllers_for_long() -> None:
    run_machine(MACHINE, "--examples", "200", "--random", "--least", "20", timeout=1800)
