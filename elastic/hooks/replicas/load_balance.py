"""The rows of a batch that each place computes, by how fast the places were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

WEIGHT = 0.2
"""Of the last measurement in the moving average."""
WARM_UP = 2
"""Passes of a place with as many tokens that are not counted."""
GAIN = 0.8
"""Another split is worth it only for a step that would take less than this share of the usual one."""


@dataclass(eq=False)
class ThroughputEstimator:
    """Seconds that places take for as many tokens: moving averages, one for each magnitude of their number.

    A few tokens take about as long as one. If places were compared by seconds per token whatever their shares, the one
    with the smaller share would look slow, and get less and less.
    """

    _token_s: dict[tuple[str, int], float] = field(default_factory=dict)
    """(place, bits of the number of tokens) -> seconds for each of them."""
    _passes: Counter[tuple[str, int]] = field(default_factory=Counter)

    def measured(self, place: str, tokens: int, seconds: float) -> None:
        """Count a measurement: a place took so long for a layer. The first ones are not counted."""
        key, token_s = (place, tokens.bit_length()), seconds / tokens
        self._passes[key] += 1
        if self._passes[key] > WARM_UP:
            before = self._token_s.get(key, token_s)
            self._token_s[key] = before + WEIGHT * (token_s - before)

    def of(self, places: Sequence[str]) -> list[float]:
        """Return the seconds of each place for the same tokens; all alike as long as none were measured at all."""
        measured = list(self._token_s)  # at once: other threads go on measuring
        common = set.intersection(*({bits for other, bits in measured if other == place} for place in places))
        if not common:
            return [1.0] * len(places)
        return [sum(self._token_s[place, bits] * 2**bits for bits in common) for place in places]

    def knows_alone(self, place: str) -> bool:
        """Return whether a place was measured with a single token."""
        return (place, 1) in self._token_s

    def best_alone(self, places: Sequence[str], present: int | None = None) -> int:
        """Choose where one row is computed: where it is, or at the first place, unless another is clearly faster.

        A row that has no KV cache yet goes to a place that was not measured.
        """
        unknown = [index for index, place in enumerate(places) if not self.knows_alone(place)]
        if unknown:
            return unknown[0] if present is None else present
        stays, seconds = present or 0, [self._token_s[place, 1] for place in places]
        best = min(range(len(places)), key=seconds.__getitem__)
        return best if seconds[best] < GAIN * seconds[stays] else stays


def split_batch(batch: int, seconds: Sequence[float], present: Sequence[int] | None = None) -> tuple[int, ...]:
    """Choose rows for each place, at least one each; of fewer rows, one for the first place and then the fastest.

    `seconds` are those that a place takes for a row. `present` are the rows that hold KV now. They stay, and new rows
    are split evenly, unless the split that the places' speeds ask for is clearly faster.
    """
    fast = _split(batch, seconds)
    usual = tuple(present) if present is not None and balanced(present) else _split(batch, [1.0] * len(seconds))
    fast_s, usual_s = (max(n * row_s for n, row_s in zip(rows, seconds, strict=True)) for rows in (fast, usual))
    return fast if fast_s < GAIN * usual_s else usual


def _split(batch: int, seconds: Sequence[float]) -> tuple[int, ...]:
    order = sorted(range(len(seconds)), key=lambda place: (place > 0, seconds[place]))
    rows = [0] * len(seconds)
    for place in order[:batch]:
        rows[place] = 1
    for _ in range(batch - len(seconds)):  # each row to the place that will have done it first
        best = min(order, key=lambda place: (rows[place] + 1) * seconds[place])
        rows[best] += 1
    return tuple(rows)


def balanced(rows: Sequence[int]) -> bool:
    """Return whether every place has a row, as far as there are rows."""
    return all(rows) or max(rows) == 1
