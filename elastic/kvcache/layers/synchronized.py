"""Methods that one thread runs at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Locked(Protocol):
    lock: threading.RLock


Owner = TypeVar("Owner", bound=Locked)


def synchronized(method: Callable[Concatenate[Owner, P], R]) -> Callable[Concatenate[Owner, P], R]:
    """Have a method run under the `lock` of its object.

    Beams are reordered and tokens cropped between forward passes, which is where caches migrate.
    """

    @wraps(method)
    def locked(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock:
            return method(self, *args, **kwargs)

    return locked
