"""Signals that end a command, so that it can still write what there is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Which signal ended the command."""

    def __init__(self) -> None:
        self._signal: int = signal.SIGINT

    @property
    def code(self) -> int:
        """The exit code, as shells have it."""
        return 128 + self._signal

    def handle(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        raise KeyboardInterrupt


@contextmanager
def terminable() -> Iterator[Interrupts]:
    """Within, SIGTERM is a `KeyboardInterrupt` too. Signals go to the main thread: in another, nothing changes."""
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    before = signal.signal(signal.SIGTERM, interrupts.handle)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGTERM, before)
