"""Every way to cut layers into stages, to measure the planner by."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, permutations

from elastic.planning.arrangement.stages import Held


def every_cut(ranks: int, layers: int) -> Iterator[dict[int, range]]:
    """Every order of the ranks, and every place to cut: rank -> its layers."""
    for order in permutations(range(ranks)):
        for cuts in combinations(range(1, layers), ranks - 1):
            edges = [0, *cuts, layers]
            yield {rank: range(edges[i], edges[i + 1]) for i, rank in enumerate(order)}


def best_score(
    ranks: Sequence[Held], cost: Sequence[float], layer_bytes: Sequence[int], first: float, last: float
) -> tuple[int, float, int] | None:
    """Bytes fetched, cost of the slowest stage, bytes moved: of the best cut that leaves each rank enough room."""
    layers = len(cost)
    own = [rank.kv_bytes or (0,) * layers for rank in ranks]
    kv = [sum(column) for column in zip(*own, strict=True)]
    scores = []
    for cut in every_cut(len(ranks), layers):
        fetched, slowest, moved = 0, 0.0, 0
        for number, run in cut.items():
            rank = ranks[number]
            if rank.room_bytes is not None and sum(layer_bytes[i] + kv[i] for i in run) > rank.room_bytes:
                break
            fetched += sum(layer_bytes[i] for i in run if i not in rank.layers)
            seconds = sum(cost[i] for i in run) + first * (run.start == 0) + last * (run.stop == layers)
            slowest = max(slowest, rank.slowness * seconds)
            moved += sum(kv[i] - own[number][i] for i in run)
        else:
            scores.append((fetched, slowest, moved))
    return min(scores, default=None)


def random_ranks(choose: random.Random, layers: int) -> list[Held]:
    """Up to four ranks that hold all layers, or a run of them, with room and keys and values of any size."""
    found = []
    for name in "abcd"[: choose.randint(1, min(4, layers))]:
        start = choose.randrange(layers)
        held = range(layers) if choose.random() < 0.5 else range(start, choose.randint(start + 1, layers))
        room = choose.choice([None, choose.randint(5, 80)])
        kv = tuple(choose.randint(0, 5) for _ in range(layers)) if choose.random() < 0.5 else ()
        found.append(Held(name, frozenset(held), room, kv, choose.choice([1.0, 2.0])))
    return found
