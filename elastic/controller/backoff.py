"""How policies learn to wait: times double with actions in a row that came to nothing, or were undone too early."""

from __future__ import annotations

import math

MOST_FAILURES = 7
MOST_REGRETS = 3
"""So many doublings at the most."""


def regretted(regrets: int, done_s: float, now_s: float, dwell_s: float, most: int = MOST_REGRETS) -> int:
    """Return the times in a row that what a policy did was undone too early, as it is undone now.

    Too early is within four times the dwell, as that is doubled by now; after longer they are forgotten. `done_s` is
    -inf where nothing was done that could be undone.
    """
    if done_s == -math.inf:
        return regrets
    return min(regrets + 1, most) if now_s - done_s < 4 * dwell_s * 2**regrets else 0
