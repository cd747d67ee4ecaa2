"""The script `elastic`: outside the package, whose import takes seconds in which an interrupt may come."""

from __future__ import annotations

import os
import signal


def main() -> int:
    """Run the command and return its exit code; an interrupt ends its imports in silence too."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:  # no `except` is sure to see it: packages take it for their own errors
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from elastic.cli.main import main as command

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return command()
