"""Running code that may hang or crash where it can do no harm."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def in_child(code: str, timeout: float = 60) -> str:
    """Run code that could hang; a hang is a failure with the stacks of all threads."""
    setup = f"import faulthandler, sys; faulthandler.dump_traceback_later({timeout / 2}, exit=True)\n"
    setup += "sys.setswitchinterval(1e-6)\n"
    child = subprocess.run(
        [sys.executable, "-P", "-c", setup + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout
