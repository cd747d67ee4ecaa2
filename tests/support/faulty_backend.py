"""A backend that fails on purpose, to show that every failure is undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic.errors import CapacityError
from elastic.memory.backends.base import PageBackend

CALLS = ("reserve", "unreserve", "create", "destroy", "map", "unmap")


class FaultyBackend:
    """Wraps a backend and raises `CapacityError` on chosen calls.

    `fail(call, nth)` arms one failure: the nth next call of that kind raises, before it does anything.
    `failures` counts those that went off.
    """

    def __init__(self, inner: PageBackend) -> None:
        self._inner = inner
        self._armed: dict[str, int] = {}
        self.failures = 0

    def fail(self, call: str, nth: int = 1) -> None:
        if call not in CALLS or nth < 1:
            raise ValueError(f"fail({call!r}, {nth}): the calls are {CALLS}, counted from 1")
        self._armed[call] = nth

    def disarm(self) -> None:
        self._armed.clear()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        return self._guarded(name, value) if name in CALLS else value

    def _guarded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            left = self._armed.pop(name, 0)
            if left == 1:
                self.failures += 1
                message = f"injected failure in {name}"
                raise CapacityError(message, requested_bytes=self._inner.page_bytes, free_bytes=0, total_bytes=0)
            if left:
                self._armed[name] = left - 1
            return call(*args, **kwargs)

        return guarded
