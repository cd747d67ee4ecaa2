"""How many rows of a batch each place computes, by how fast the places were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

WEIGHT = 0.2
"""Of the last measurement in the moving average."""
WARM_UP = 2
"""Passes of a place with as many tokens that are not counted."""
GAIN = 0.8
"""Another split is worth it only for a step that would take less than this share of the usual one."""


class ThroughputEstimator:
    """How fast places are for as many tokens: moving averages, one for each magnitude of their number.

    A few tokens take about as long as one. If places were compared by seconds per token whatever their shares, the one
    with the smaller share would look slow, and get less and less.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, int], float] = {}  # (place, bits of the number of tokens) -> for each of them
        self._seen: Counter[tuple[str, int]] = Counter()

    def measured(self, place: str, tokens: int, seconds: float) -> None:
        """A place took so long for a layer; the first times are not counted."""
        size, each = (place, tokens.bit_length()), seconds / tokens
        self._seen[size] += 1
        if self._seen[size] > WARM_UP:
            before = self._seconds.get(size, each)
            self._seconds[size] = before + WEIGHT * (each - before)

    def of(self, places: Sequence[str]) -> list[float]:
        """Seconds of each place for the same tokens; all alike as long as there are none that all have had."""
        known = list(self._seconds)
        common = set.intersection(*({bits for place, bits in known if place == one} for one in places))
        if not common:
            return [1.0] * len(places)
        return [sum(self._seconds[place, bits] * 2**bits for bits in common) for place in places]

    def knows_alone(self, place: str) -> bool:
        """Whether it is known what a single token takes there."""
        return (place, 1) in self._seconds

    def best_alone(self, places: Sequence[str], present: int | None = None) -> int:
        """Where one row is computed: where it is, or at the first place, unless another is clearly faster.

        A row that has no KV cache yet goes where it is not known how fast that is.
        """
        unknown = [index for index, place in enumerate(places) if not self.knows_alone(place)]
        if unknown:
            return unknown[0] if present is None else present
        stays, seconds = present or 0, [self._seconds[place, 1] for place in places]
        best = min(range(len(places)), key=seconds.__getitem__)
        return best if seconds[best] < GAIN * seconds[stays] else stays


def split_batch(batch: int, seconds: Sequence[float], present: Sequence[int] | None = None) -> tuple[int, ...]:
    """Rows for each place, at least one each; of fewer rows than places, one for the first and then the fastest.

    `seconds` are those that a place takes for a row. `present` are the rows that hold KV now. They stay, and new rows
    are shared out alike, unless the split that the places' speeds ask for is clearly faster.
    """
    fast = _shared(batch, seconds)
    usual = tuple(present) if present is not None and balanced(present) else _shared(batch, [1.0] * len(seconds))
    return fast if _step(fast, seconds) < GAIN * _step(usual, seconds) else usual


def _shared(batch: int, seconds: Sequence[float]) -> tuple[int, ...]:
    order = sorted(range(len(seconds)), key=lambda place: (place > 0, seconds[place]))
    rows = [0] * len(seconds)
    for place in order[:batch]:
        rows[place] = 1
    for _ in range(batch - len(seconds)):  # each row to the place that will have done it first
        best = min(order, key=lambda place: (rows[place] + 1) * seconds[place])
        rows[best] += 1
    return tuple(rows)


def balanced(rows: Sequence[int]) -> bool:
    """Whether every place has a row, as far as there are rows."""
    return all(rows) or max(rows) == 1


def _step(rows: Sequence[int], seconds: Sequence[float]) -> float:
    return max(count * each for count, each in zip(rows, seconds, strict=True))
