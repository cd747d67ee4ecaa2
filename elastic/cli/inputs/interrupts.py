"""Signals that end a command: in silence while it is imported, and later so that it can still write what there is."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT


@dataclass
class Interrupts:
    """The signal that ended the command."""

    code: int = INTERRUPTED
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


@contextmanager
def leaving_on_interrupt() -> Iterator[None]:
    """End the process at an interrupt, in silence, while modules are imported.

    No `except` is sure to see one then: packages take it for an error of their own. Where the handler is not Python's,
    or the thread not the main one, nothing changes.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
