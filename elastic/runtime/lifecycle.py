"""The end of a wrapped model: who still uses it, and the end of its process.

Forks refuse to run, and workers and daemon threads stop before the interpreter does.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable
from typing import Any

FORKED = (
    "this model was wrapped before the process forked: its weights lie in pages of the parent, which may change them; "
    "load and wrap it again in the child, or where CUDA was in use in a process that is spawned"
)
EXIT_TIMEOUT_S = 10
running: weakref.WeakSet[Any] = weakref.WeakSet()
"""The runtimes of this process that were started."""


class Occupation:
    """The use of a model by somebody who does not want it to be unwrapped."""

    def __init__(self, by: str, among: list[Occupation]) -> None:
        """`among`: all of the model."""
        self.by, self._among = by, among
        self.end_dropped: Callable[[], bool] = lambda: False
        """Has a user leave who is himself dropped, if he can now, and returns whether he has."""
        among.append(self)

    def end(self) -> None:
        """Let the model be unwrapped."""
        self._among.remove(self)


def nothing() -> None:
    """Stand for a runtime in a pickled copy of its model, which is not wrapped."""


def _refuse_in_child() -> None:
    """Let no forward pass of a wrapped model run after a fork: the pages belong to the parent."""
    for runtime in list(running):
        runtime.gate.refusal = FORKED


def _close_all() -> None:
    """Close runtimes at exit: a thread that is in torch when the interpreter ends would abort it."""
    for runtime in list(running):
        if not runtime.in_forked_child:
            runtime.close(timeout_s=EXIT_TIMEOUT_S)
            runtime.gate.end_daemons(EXIT_TIMEOUT_S)


os.register_at_fork(after_in_child=_refuse_in_child)
atexit.register(_close_all)
