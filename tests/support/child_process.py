"""Running code that may hang or crash where it can do no harm, and waiting for background work."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

from elastic.memory.background import janitor


def in_child(code: str, timeout: float = 240) -> str:
    """Run code that could hang; a hang is a failure with the stacks of all threads."""
    setup = f"import faulthandler, sys; faulthandler.dump_traceback_later({timeout - 10}, exit=True)\n"
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


def wait_for_the_janitor() -> None:
    """Return when all that was left for the background thread until now is done."""
    done = threading.Event()
    janitor.submit(done.set)
    assert done.wait(timeout=60)
