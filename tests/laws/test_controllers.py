from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MACHINE = Path(__file__).with_name("controller_machine.py")


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


def test_the_laws_hold_under_controllers() -> None:
    run_machine("--examples", "12", "--steps", "30", "--least", "1", timeout=300)


@pytest.mark.long
def test_the_laws_hold_under_controllers_for_long() -> None:
    run_machine("--examples", "200", "--random", "--least", "20", timeout=1800)
