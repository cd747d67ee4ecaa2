"""The requests of an engine's batch that each place computes, by how fast the places were."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

from elastic.hooks.replicas.load_balance import GAIN


def share_requests(tokens: Sequence[int], seconds: Sequence[float]) -> tuple[int, ...]:
    """Choose consecutive requests for each place, at least one each, so that all end with their tokens together.

    Of fewer requests than places, one for the first and then the fastest. `seconds` are those that places take for the
    same tokens: where the split that they ask for would not be clearly faster, all places are taken to be alike.
    """
    order = sorted(range(len(seconds)), key=lambda place: (place > 0, seconds[place]))
    chosen = sorted(order[: len(tokens)])
    token_s = [seconds[place] for place in chosen]
    ends = list(accumulate(tokens, initial=0))
    even, fast = _cut(ends, [1.0] * len(chosen)), _cut(ends, token_s)
    fast_s, even_s = (  # seconds until the last place is done
        max((ends[b] - ends[a]) * each_s for (a, b), each_s in zip(pairwise(cuts), token_s, strict=True))
        for cuts in (fast, even)
    )
    cuts = fast if fast_s < GAIN * even_s else even
    shares = [0] * len(seconds)
    for place, (start, stop) in zip(chosen, pairwise(cuts), strict=True):
        shares[place] = stop - start
    return tuple(shares)


def _cut(ends: Sequence[int], seconds: Sequence[float]) -> list[int]:
    """Return the requests before each place, and all: the cuts nearest to the tokens done in the same time."""
    speeds = list(accumulate(1 / token_s for token_s in seconds))
    cuts = [0]
    for place, speed in enumerate(speeds[:-1]):
        wanted = ends[-1] * speed / speeds[-1]
        places_left = len(seconds) - 1 - place
        cut = bisect_left(ends, wanted, first := cuts[-1] + 1, len(ends) - 1 - places_left)
        cuts.append(cut - 1 if cut > first and wanted - ends[cut - 1] < ends[cut] - wanted else cut)
    return [*cuts, len(ends) - 1]
