"""How many rows of a batch each place computes, by how fast the places were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

WEIGHT = 0.2
"""Of the last measurement in the moving average."""
WARM_UP = 2
"""Passes of a set of places that are not counted."""
GAIN = 0.8
"""Rows that have a KV cache move only for a step that would take less than this share of the present one."""


class Speeds:
    """Seconds that each place takes for a row: a moving average over passes in which all of them took part."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._seen: dict[frozenset[str], int] = {}

    def measured(self, seconds_per_row: Mapping[str, float]) -> None:
        """What the places took, side by side in one pass."""
        places = frozenset(seconds_per_row)
        self._seen[places] = self._seen.get(places, 0) + 1
        if self._seen[places] <= WARM_UP:
            return
        for place, seconds in seconds_per_row.items():
            before = self._seconds.get(place, seconds)
            self._seconds[place] = before + WEIGHT * (seconds - before)

    def of(self, places: Sequence[str]) -> list[float]:
        """Seconds for a row; all alike as long as one of them is unknown."""
        known = [self._seconds.get(place, 0.0) for place in places]
        return known if all(known) else [1.0] * len(places)


def share_out(batch: int, seconds: Sequence[float], present: Sequence[int] | None = None) -> tuple[int, ...]:
    """Rows for each place, at least one each; of fewer rows than places, one for the first and then the fastest.

    The first place's own layer is called in any case. `seconds` are those that a place takes for a row. `present` are
    the rows that hold KV now: they stay unless another split would be clearly faster.
    """
    order = sorted(range(len(seconds)), key=lambda place: (place > 0, seconds[place]))
    rows = [0] * len(seconds)
    for place in order[:batch]:
        rows[place] = 1
    for _ in range(batch - len(seconds)):  # each row to the place that will have done it first
        best = min(order, key=lambda place: (rows[place] + 1) * seconds[place])
        rows[best] += 1
    if present is not None and balanced(present) and _step(rows, seconds) >= GAIN * _step(present, seconds):
        return tuple(present)
    return tuple(rows)


def balanced(rows: Sequence[int]) -> bool:
    """Whether every place has a row, as far as there are rows."""
    return all(rows) or max(rows) == 1


def _step(rows: Sequence[int], seconds: Sequence[float]) -> float:
    return max(count * each for count, each in zip(rows, seconds, strict=True))
