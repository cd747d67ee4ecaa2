"""How the requests of an engine's batch are shared out between places, by how fast the places were."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

from elastic.hooks.replicas.load_balance import GAIN


def share_requests(tokens: Sequence[int], seconds: Sequence[float]) -> tuple[int, ...]:
    """Consecutive requests for each place, at least one each, so that all are done with their tokens at about one time.

    Of fewer requests than places, one for the first and then the fastest. `seconds` are those that places take for the
    same tokens: where the split that they ask for would not be clearly faster, all places are taken to be alike.
    """
    order = sorted(range(len(seconds)), key=lambda place: (place > 0, seconds[place]))
    chosen = sorted(order[: len(tokens)])
    known = [seconds[place] for place in chosen]
    ends = list(accumulate(tokens, initial=0))
    even, fast = _cut(ends, [1.0] * len(chosen)), _cut(ends, known)
    cuts = fast if _step(ends, fast, known) < GAIN * _step(ends, even, known) else even
    shares = [0] * len(seconds)
    for place, (start, stop) in zip(chosen, pairwise(cuts), strict=True):
        shares[place] = stop - start
    return tuple(shares)


def _cut(ends: Sequence[int], seconds: Sequence[float]) -> list[int]:
    """Requests before each place, and all: the cuts nearest to the tokens that places can do in the same time."""
    speeds = list(accumulate(1 / each for each in seconds))
    cuts = [0]
    for speed, left in zip(speeds[:-1], range(len(seconds) - 1, 0, -1), strict=True):
        wanted = ends[-1] * speed / speeds[-1]
        cut = bisect_left(ends, wanted, first := cuts[-1] + 1, len(ends) - 1 - left)
        cuts.append(cut - 1 if cut > first and wanted - ends[cut - 1] < ends[cut] - wanted else cut)
    return [*cuts, len(ends) - 1]


def _step(ends: Sequence[int], cuts: Sequence[int], seconds: Sequence[float]) -> float:
    """Until the last place is done."""
    return max((ends[b] - ends[a]) * each for (a, b), each in zip(pairwise(cuts), seconds, strict=True))
