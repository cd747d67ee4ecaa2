from __future__ import annotations

from pathlib import Path

import pytest

from laws.machine_process import run_machine

MACHINE = Path(__file__).with_name("generation_machine.py")


def test_the_laws_hold_while_other_threads_generate(device: str) -> None:
    # where memory is larger, fewer actions have to wait, and fewer repeat
    examples, least = ("12", "75") if device == "cpu" else ("56", "300")
    run_machine(MACHINE, "--device", device, "--examples", examples, "--steps", "50", "--least", least, timeout=600)


@pytest.mark.long
def test_the_laws_hold_for_five_times_as_many_examples() -> None:
    run_machine(MACHINE, "--examples", "64", "--steps", "50", "--least", "500", timeout=600)


@pytest.mark.long
def test_the_laws_hold_for_long() -> None:
    run_machine(MACHINE, "--examples", "400", "--steps", "60", "--random", timeout=1800)
