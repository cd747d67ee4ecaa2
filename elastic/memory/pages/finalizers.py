"""Calls when objects die, as `weakref.finalize` makes them, but without any work at the end of the interpreter.

`weakref.finalize` goes through the finalizers of the process then, and fails if a daemon thread makes one meanwhile:
the finalizers of others, such as those of temporary directories, are left out. Here none is called at the end.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

_Call = tuple[weakref.ref[Any], Callable[..., object], tuple[Any, ...]]
_calls: dict[int, _Call] = {}
"""By the id of the reference: its referent may have no hash. One operation each, so that no lock is needed."""


def call_at_death(thing: object, call: Callable[..., object], *args: Any) -> weakref.ref[Any]:
    """Have `call(*args)` called once `thing` is gone, if the process lives; returns what `cancel` takes.

    It is called in any thread, in the middle of anything: it may take no lock of Elastic, wait for nothing, and raise
    nothing.
    """
    reference = weakref.ref(thing, _died)
    _calls[id(reference)] = reference, call, args
    return reference


def cancel(reference: weakref.ref[Any]) -> None:
    """Have what `call_at_death` returned make no call. Can be called twice."""
    _calls.pop(id(reference), None)


def _died(
    reference: weakref.ref[Any],
    calls: dict[int, _Call] = _calls,
    is_finalizing: Callable[[], bool] = sys.is_finalizing,
) -> None:  # by defaults, as modules lose their names when the interpreter ends
    entry = calls.pop(id(reference), None)
    if entry is not None and not is_finalizing():
        _, call, args = entry
        call(*args)
