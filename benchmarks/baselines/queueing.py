"""Requests that devices serve first come, first served, one at a time, as iServe's scheduler does. (Section 6)

A request takes its stages one after another, each on all of its devices at once, which other models may share. It is a
computation, not an approximation: what is ready first begins first wherever it needs the same device.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence

from elastic.errors import ConfigError

Operation = tuple[Sequence[str], float]
"""The devices that a stage is on, and the seconds that it keeps all of them."""


class FirstComeFirstServed:
    """The queues of some devices. Times are in seconds, and given in ascending order."""

    def __init__(self, devices: Iterable[str]) -> None:
        self._free_s = dict.fromkeys(devices, 0.0)
        self._busy: dict[str, list[tuple[float, float]]] = {name: [] for name in self._free_s}
        self._ready: list[tuple[float, int, int]] = []  # when, request, number of its next operation
        self._operations: list[Sequence[Operation]] = []
        self._now_s = 0.0
        self.ends_s: list[float] = []
        """When each request ends, by its number; inf while that is not known."""

    def submit(self, at_s: float, operations: Sequence[Operation]) -> int:
        """Let a request arrive; return its number. Raises `ConfigError` for one that comes before what has begun."""
        if at_s < self._now_s or not operations:
            raise ConfigError(f"a request at {at_s} s with {len(operations)} stages comes too late, or does nothing")
        self._operations.append(operations)
        self.ends_s.append(math.inf)
        heapq.heappush(self._ready, (at_s, len(self.ends_s) - 1, 0))
        return len(self.ends_s) - 1

    def advance(self, until_s: float = math.inf) -> None:
        """Begin, in this order, all that is ready until then."""
        self._now_s = max(self._now_s, until_s)
        while self._ready and self._ready[0][0] <= until_s:
            ready_s, request, number = heapq.heappop(self._ready)
            devices, seconds = self._operations[request][number]
            begin_s = max(ready_s, self.free_s(devices))
            for name in devices:
                self._free_s[name] = begin_s + seconds
                self._busy[name].append((begin_s, begin_s + seconds))
            if number + 1 < len(self._operations[request]):
                heapq.heappush(self._ready, (begin_s + seconds, request, number + 1))
            else:
                self.ends_s[request] = begin_s + seconds

    def free_s(self, devices: Iterable[str]) -> float:
        """Return when all of these devices have done what was ready until now."""
        return max(self._free_s[name] for name in devices)

    def load(self, device: str, now_s: float, window_s: float) -> float:
        """Return the share of the last seconds in which a device was busy."""
        return self.busy_s(device, now_s - window_s, now_s) / window_s

    def busy_s(self, device: str, begin_s: float, end_s: float) -> float:
        """Return for how long a device was busy between two times."""
        busy_s = 0.0
        for begun_s, ended_s in reversed(self._busy[device]):
            if ended_s <= begin_s:
                break
            busy_s += max(0.0, min(ended_s, end_s) - max(begun_s, begin_s))
        return busy_s
