"""Signals that end a command, so that it can still write what there is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """The signal that ended the command."""

    def __init__(self) -> None:
        self.code: int = 128 + signal.SIGINT
        """The exit code, as shells have it."""

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Keep the exit code of a signal, and raise `KeyboardInterrupt`."""
        self.code = 128 + number
        raise KeyboardInterrupt


@contextmanager
def terminable() -> Iterator[Interrupts]:
    """Have SIGTERM raise `KeyboardInterrupt` too. Signals go to the main thread: in another, nothing changes."""
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    before = signal.signal(signal.SIGTERM, interrupts.handle)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGTERM, before)
