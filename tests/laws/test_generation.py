from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MACHINE = Path(__file__).with_name("generation_machine.py")


def run_machine(*arguments: str, timeout: float) -> None:
    child = subprocess.run(
        [sys.executable, str(MACHINE), "--timeout", str(timeout), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout + 60,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert child.returncode == 0, (child.stdout + child.stderr)[-20000:]
    print(child.stdout)


def test_the_laws_hold_while_other_threads_generate(device: str) -> None:
    # where memory is larger, fewer actions have to wait, and fewer repeat
    examples, least = ("28", "150") if device == "cpu" else ("56", "300")
    run_machine("--device", device, "--examples", examples, "--steps", "50", "--least", least, timeout=600)


@pytest.mark.long
def test_the_laws_hold_for_twice_as_many_examples() -> None:
    run_machine("--examples", "56", "--steps", "50", "--least", "500", timeout=600)


@pytest.mark.long
def test_the_laws_hold_for_long() -> None:
    run_machine("--examples", "400", "--steps", "60", "--random", timeout=1800)
