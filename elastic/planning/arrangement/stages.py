"""Which layers stay where when ranks become the stages of a pipeline: consecutive runs of what each still holds.

KunServe leaves open what a group of more than two, a second drop, or ranks of unlike budgets keep (section 4.1). Here
the slowest stage is as fast as it can be, by dynamic programming; no weights are fetched where that can be avoided.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from elastic.errors import ConfigError

EXACT = 5
"""Up to so many ranks every order of them is tried; more stand in the order of the layers that they hold."""


@dataclass(frozen=True)
class Held:
    """One rank of a group (or an instance of several ranks that share each layer), and the layers that it holds."""

    name: str
    layers: frozenset[int]
    room_bytes: int | None = None
    """For layers and their keys and values together; None: it is not the limit."""
    kv_bytes: tuple[int, ...] = ()
    """By layer, of the keys and values that it has; (): none."""
    slowness: float = 1.0
    """How many times as long as another rank it takes."""


@dataclass(frozen=True)
class StageCut:
    """A pipeline's stages."""

    layers: tuple[range, ...]
    """Of each rank, in the order in which the ranks were given."""
    bottleneck: float
    """The cost of the slowest stage."""
    moved_bytes: int
    """Keys and values that have to go to another rank."""
    fetched: tuple[tuple[int, ...], ...]
    """Of each rank, the layers of its stage that it does not hold."""
    fetched_bytes: int = 0


Score = tuple[float, float]
ScoredCut = tuple[Score, tuple[tuple[int, int, int], ...]]
"""The score of a cut, and its stages: (rank, first layer, layer behind the last)."""


def stages(
    ranks: Sequence[Held],
    cost: Sequence[float],
    layer_bytes: Sequence[int],
    *,
    first: float = 0.0,
    last: float = 0.0,
) -> StageCut | None:
    """Cut the layers into one run for each rank, of one layer at least. None: no cut leaves each rank enough room.

    `cost` and `layer_bytes` are by layer; `first` and `last` are what the first and the last stage compute besides
    (embedding; final norm and head). Of all cuts one that fetches the fewest bytes of weights is chosen, nothing where
    that is possible; of these one whose slowest stage costs least; of these one that moves the fewest keys and values.
    Raises `ConfigError` for no rank, and for unlike numbers of layers.
    """
    count = len(cost)
    if not ranks or len(layer_bytes) != count or any(len(rank.kv_bytes) not in (0, count) for rank in ranks):
        raise ConfigError(f"{len(ranks)} ranks and {count} layers cannot be cut; give bytes and a cost of each layer")
    if len(ranks) > count:
        return None
    table = _Table(ranks, cost, layer_bytes, first, last)
    limited = any(rank.room_bytes is not None for rank in ranks)
    kinds = tuple(replace(rank, name="", kv_bytes=rank.kv_bytes if limited else ()) for rank in ranks)
    best = _least_cost(kinds, tuple(cost), tuple(layer_bytes), first, last)
    if best is None:
        return None
    fetched_bytes, bottleneck = best
    limit = bottleneck * (1 + 1e-12)
    least = table.search(lambda *run: (table.fetched(*run), table.moved(*run)), limit)
    assert least is not None
    (_, moved), cuts = least
    runs = {rank: range(start, stop) for rank, start, stop in cuts}
    cut = tuple(runs[number] for number in range(len(ranks)))
    fetched = tuple(tuple(i for i in run if i not in rank.layers) for rank, run in zip(ranks, cut, strict=True))
    return StageCut(cut, bottleneck, int(moved), fetched, int(fetched_bytes))


@lru_cache(maxsize=1024)  # many groups are of the same kinds of ranks
def _least_cost(
    kinds: tuple[Held, ...], cost: tuple[float, ...], layer_bytes: tuple[int, ...], first: float, last: float
) -> Score | None:
    """Return the fewest bytes that must be fetched, and the cost of the slowest stage of the best such cut."""
    table = _Table(kinds, cost, layer_bytes, first, last)
    least = table.search(lambda *run: (table.fetched(*run), table.cost(*run)))
    return None if least is None else least[0]


class _Table:
    """Costs of any run of layers at any rank, from sums over the layers before each one."""

    def __init__(
        self, ranks: Sequence[Held], cost: Sequence[float], layer_bytes: Sequence[int], first: float, last: float
    ) -> None:
        count = len(cost)
        held = [(min(rank.layers, default=0), max(rank.layers, default=0)) for rank in ranks]
        self._order = sorted(range(len(ranks)), key=held.__getitem__)
        own = [rank.kv_bytes or (0,) * count for rank in ranks]
        every = [sum(column) for column in zip(*own, strict=True)]
        self._ranks, self._count, self._first, self._last = ranks, count, first, last
        self._quickest = min(rank.slowness for rank in ranks)
        self._cost = _before(cost)
        self._kv = _before(every)
        self._own = [_before(kv) for kv in own]
        self._weights = _before(layer_bytes)
        self._missing = [
            _before([0 if layer in rank.layers else nbytes for layer, nbytes in enumerate(layer_bytes)])
            for rank in ranks
        ]

    def fetched(self, rank: int, start: int, stop: int) -> float:
        return self._missing[rank][stop] - self._missing[rank][start]

    def moved(self, rank: int, start: int, stop: int) -> float:
        own = self._own[rank]
        return self._kv[stop] - self._kv[start] - own[stop] + own[start]

    def cost(self, rank: int, start: int, stop: int) -> float:
        seconds = self._cost[stop] - self._cost[start]
        seconds += (self._first if start == 0 else 0.0) + (self._last if stop == self._count else 0.0)
        return seconds * self._ranks[rank].slowness

    def search(self, score: Callable[[int, int, int], Score], limit: float | None = None) -> ScoredCut | None:
        """Find the cut of the least score: sums of its first part, then the most of its second one.

        With `limit` no stage costs more than that, and the second part is summed, too.
        """
        best: dict[tuple[int, int], ScoredCut] = {(0, 0): ((0, 0), ())}  # by ranks with a stage, and layers in one
        for used in self._used():
            for start in range(self._count):
                state = best.get((used, start))
                if state is None:
                    continue
                (first, second), cuts = state
                for rank, stop in self._next(used, start, math.inf if limit is None else limit):
                    more, most = score(rank, start, stop)
                    most = second + most if limit is not None else max(second, most)
                    key = used | 1 << rank, stop
                    cheapest = best.get(key)
                    if cheapest is None or (first + more, most) < cheapest[0]:
                        best[key] = (first + more, most), (*cuts, (rank, start, stop))
        return best.get(((1 << len(self._ranks)) - 1, self._count))

    def _used(self) -> Iterable[int]:
        """List the sets of ranks, as bits, that may have the first stages."""
        count = len(self._ranks)
        if count <= EXACT:
            return range((1 << count) - 1)
        return accumulate([1 << rank for rank in self._order[:-1]], initial=0)

    def _next(self, used: int, start: int, limit: float) -> Iterator[tuple[int, int]]:
        """List the stages that may follow, (rank, stop), and cost no more; each rank behind has one layer at least."""
        ranks, number = range(len(self._ranks)), used.bit_count()
        behind = len(ranks) - number - 1
        least = self._cost[-1] + self._last - behind * limit * (1 + 1e-9) / self._quickest  # else the others have more
        soonest = max(start + 1, bisect_left(self._cost, least)) if limit < math.inf else start + 1
        for rank in ranks if len(ranks) <= EXACT else self._order[number : number + 1]:
            if used >> rank & 1:
                continue
            room = self._ranks[rank].room_bytes
            for stop in range(soonest, self._count - behind + 1) if behind else (self._count,):
                nbytes = self._weights[stop] - self._weights[start] + self._kv[stop] - self._kv[start]
                if (room is not None and nbytes > room) or self.cost(rank, start, stop) > limit:
                    break
                yield rank, stop


def _before(amounts: Sequence[float]) -> list[float]:
    """Return the sums of those before each one, and before the end."""
    return list(accumulate(amounts, initial=0))
