"""What a process does that measures beside what is served: it rests, and ends with whoever started it.

It imports nothing else: processes that do no more than measure start with it.
"""

from __future__ import annotations

import ctypes
import signal
import time

_PR_SET_PDEATHSIG = 1


def rest_behind(share: float, seconds: float) -> None:
    """Sleep behind something that took so long, so that it was that share of the time."""
    time.sleep(seconds * (1 - share) / share)


def end_with_parent() -> None:
    """Have this process be killed when whoever started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
