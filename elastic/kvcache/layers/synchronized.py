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
    """Have a method run under the `lock` of its object; of one that became a stock layer meanwhile, that layer's.

    Beams are reordered and tokens cropped between forward passes, which is where caches migrate, and models are
    unwrapped.
    """

    @wraps(method)
    def locked(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> R:
        lock = getattr(self, "lock", None)
        if lock is not None:
            with lock:
                if getattr(self, "lock", None) is lock:
                    return method(self, *args, **kwargs)
        stock: R = getattr(self, method.__name__)(*args, **kwargs)
        return stock

    return locked
