"""A backend that fails on purpose, to show that every failure is undone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from elastic.errors import CapacityError
from elastic.memory.backends.base import PageBackend

CALLS = ("reserve", "unreserve", "create", "destroy", "map", "unmap")


class FaultyBackend:
    """Wraps a backend and raises `CapacityError` on chosen calls.

    `fail(call, nth)` arms one failure: the nth next call of that kind raises, before it does anything; `half_way` it
    has done half of it and has undone that, as far as it can be: pages that were destroyed have lost their contents.
    `failures` counts those that went off.
    """

    def __init__(self, inner: PageBackend) -> None:
        self._inner = inner
        self._armed: dict[str, tuple[int, bool]] = {}
        self._mapped: dict[int, int] = {}  # address -> page
        self.failures = 0
        self.reserved: set[int] = set()
        """Addresses at which ranges begin that were not given back."""

    def fail(self, call: str, nth: int = 1, *, half_way: bool = False) -> None:
        if call not in CALLS or nth < 1:
            raise ValueError(f"fail({call!r}, {nth}): the calls are {CALLS}, counted from 1")
        self._armed[call] = nth, half_way

    def disarm(self) -> None:
        self._armed.clear()

    def map(self, address: int, pages: Sequence[int], **options: Any) -> None:
        half = pages[: len(pages) // 2]

        def map_half() -> None:
            self._inner.map(address, half, **options)
            self._inner.unmap(address, len(half), **options)

        self._fail_if_armed("map", map_half)
        self._inner.map(address, pages, **options)
        self._mapped.update(zip(self._addresses(address, len(pages)), pages, strict=True))

    def unmap(self, address: int, count: int, **options: Any) -> None:
        def unmap_half() -> None:
            self._inner.unmap(address, count // 2, **options)
            half = [self._mapped[at] for at in self._addresses(address, count // 2)]
            self._inner.map(address, half, **options)

        self._fail_if_armed("unmap", unmap_half)
        self._inner.unmap(address, count, **options)
        for at in self._addresses(address, count):
            self._mapped.pop(at, None)  # what was mapped before the wrapper is not known to it

    def create(self, pages: Sequence[int]) -> None:
        self._fail_if_armed("create", lambda: self._and_back(self._inner.create, self._inner.destroy, pages))
        self._inner.create(pages)

    def destroy(self, pages: Sequence[int]) -> None:
        self._fail_if_armed("destroy", lambda: self._and_back(self._inner.destroy, self._inner.create, pages))
        self._inner.destroy(pages)

    def reserve(self, nbytes: int, **options: Any) -> int:
        self._fail_if_armed("reserve", lambda: self._inner.unreserve(self._inner.reserve(nbytes, **options), nbytes))
        address = self._inner.reserve(nbytes, **options)
        self.reserved.add(address)
        return address

    def unreserve(self, address: int, nbytes: int) -> None:
        self._fail_if_armed("unreserve", lambda: None)
        self._inner.unreserve(address, nbytes)
        self.reserved.discard(address)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _addresses(self, address: int, count: int) -> range:
        return range(address, address + count * self._inner.page_bytes, self._inner.page_bytes)

    def _and_back(
        self, do: Callable[[Sequence[int]], None], undo: Callable[[Sequence[int]], None], pages: Sequence[int]
    ) -> None:
        half = pages[: len(pages) // 2]
        do(half)
        undo(half)

    def _fail_if_armed(self, name: str, half: Callable[[], object]) -> None:
        left, half_way = self._armed.pop(name, (0, False))
        if left > 1:
            self._armed[name] = left - 1, half_way
        elif left:
            self.failures += 1
            if half_way:
                half()
            message = f"injected failure in {name}"
            raise CapacityError(message, requested_bytes=self._inner.page_bytes, free_bytes=0, total_bytes=0)
