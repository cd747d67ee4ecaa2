"""The share of the last two minutes in which a rank computed: its load. (iServe, section 6)"""

from __future__ import annotations

import math
from collections import deque

from elastic.planning.deployment.devices import WINDOW_S


class BusyWindow:
    """Seconds in which something was busy, by the second in which they passed. O(1) for each second of time.

    Times are of any clock that does not run backwards. The window has a bucket for each of its seconds, the present one
    the last.
    """

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._head = math.floor(began_s)
        self._seconds = deque([0.0] * WINDOW_S, maxlen=WINDOW_S)

    def add(self, begin_s: float, end_s: float) -> None:
        """Note that it was busy from one time to another, which is not before the last one noted."""
        begin_s = max(begin_s, end_s - WINDOW_S)
        while begin_s < end_s:
            until_s = min(end_s, math.floor(begin_s) + 1)
            self._advance(begin_s)
            self._seconds[-1] += until_s - begin_s
            begin_s = until_s

    def share(self, now_s: float) -> float:
        """Return the busy share of the window, or of the time since the beginning while that is shorter."""
        self._advance(now_s)
        covered_s = min(now_s - self._began_s, WINDOW_S - 1 + now_s - self._head)
        return min(1.0, math.fsum(self._seconds) / covered_s) if covered_s > 0 else 0.0

    def _advance(self, now_s: float) -> None:
        passed = math.floor(now_s) - self._head
        if passed > 0:
            self._seconds.extend([0.0] * min(passed, WINDOW_S))
            self._head += passed
