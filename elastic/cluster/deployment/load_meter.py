"""The requests that a deployment gets, as estimates want them: how many a second, and how long."""

from __future__ import annotations

import math
from collections import deque

from elastic.controller.snapshot import RequestStats
from elastic.planning.estimate.performance import Load

WINDOW_S, LEAST_S = 60.0, 10.0
"""Over how much time requests are counted, and the least that says something of their rate."""


class LoadMeter:
    """The load of the last minute, from counts since the start. One thread's at a time."""

    def __init__(self, expected: Load) -> None:
        self.expected = expected
        """What is to be ready for, at the least."""
        self._told: deque[tuple[float, RequestStats]] = deque()

    def tell(self, now_s: float, stats: RequestStats) -> None:
        """Note the counts of this moment."""
        self._told.append((now_s, stats))
        while now_s - self._told[0][0] > WINDOW_S:
            self._told.popleft()

    @property
    def load(self) -> Load:
        """The load that was measured, and no less than is expected: nor a lower rate, nor shorter requests.

        What is more than expected is rounded upward to two digits, so that a steady load is the same at each look.
        Tokens are those of requests that go on, too: these count as they arrive, so that a few that have ended are not
        taken to have got the tokens of all.
        """
        if len(self._told) < 2:
            return self.expected
        (since_s, before), (now_s, after) = self._told[0], self._told[-1]
        arrived, ended = after.arrived - before.arrived, after.completed - before.completed
        if now_s - since_s < LEAST_S or not arrived:
            return self.expected
        taken = arrived - (after.rejected - before.rejected)
        prompt = (after.prompt_tokens - before.prompt_tokens) / max(1, taken)
        new = (after.generated_tokens - before.generated_tokens) / max(arrived, ended)
        least = self.expected
        return Load(
            round(_upward(prompt, least.prompt)),
            round(_upward(new, least.new)),
            _upward(arrived / (now_s - since_s), least.rate),
        )


def _upward(measured: float, least: float) -> float:
    """Return what was measured, rounded upward to two digits, or the least if that is more."""
    if measured <= least:
        return least
    digits = 1 - math.floor(math.log10(measured))
    return round(math.ceil(round(measured * 10.0**digits, 6)) / 10.0**digits, max(0, digits))
