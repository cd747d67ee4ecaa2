"""Interrupts while modules are imported: no `except` is sure to see one, as packages take it for their own errors."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 128 + signal.SIGINT


@contextmanager
def leaving_on_interrupt() -> Iterator[None]:
    """End the process at an interrupt, in silence; elsewhere than at Python's own handler: as it was."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
