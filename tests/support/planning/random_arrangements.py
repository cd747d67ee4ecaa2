"""Arrangements, assignments and what ranks hold, for properties of the functions over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import strategies as st

from elastic.planning.arrangement.arrangement import Arrangement, Copies
from elastic.planning.arrangement.transfers import LayerKV

RANKS = ("a", "b", "c", "d", "e", "f")


@st.composite
def copies(draw: st.DrawFn, ranks: Sequence[str] = RANKS) -> Copies:
    """Some of the ranks, in copies of one, two or four."""
    left = draw(st.permutations(ranks))[: draw(st.integers(1, len(ranks)))]
    found = []
    while left:
        parts = draw(st.sampled_from([n for n in (1, 2, 4) if n <= len(left)]))
        found.append(tuple(left[:parts]))
        left = left[parts:]
    return tuple(found)


@st.composite
def arrangements(draw: st.DrawFn, layers: int) -> Arrangement:
    kinds = draw(st.lists(copies(), min_size=1, max_size=3))
    chosen = tuple(draw(st.sampled_from(kinds)) for _ in range(layers))
    return Arrangement(chosen, chosen[0][0][0], draw(st.integers(0, 3)))


@st.composite
def assignments(draw: st.DrawFn, arrangement: Arrangement, requests: Sequence[str]) -> dict[str, tuple[int, ...]]:
    return {
        request: tuple(draw(st.integers(0, len(layer) - 1)) for layer in arrangement.layers) for request in requests
    }


def held(arrangement: Arrangement, path: Sequence[int], layer: int, kv: LayerKV) -> dict[str, set[int]]:
    """Rank -> heads of one request that it has, worked out head by head."""
    shards = arrangement.layers[layer][path[layer]]
    found: dict[str, set[int]] = {rank: set() for rank in shards}
    for head in range(kv.heads):
        for i, rank in enumerate(shards):
            if kv.heads >= len(shards):
                mine = head // (kv.heads // len(shards)) == i
            else:
                mine = i // (len(shards) // kv.heads) == head
            if mine:
                found[rank].add(head)
    return found


def ledger(
    arrangement: Arrangement,
    assignment: Mapping[str, Sequence[int]],
    kv: Sequence[LayerKV],
    tokens: Mapping[str, int],
    weights: Sequence[int],
) -> dict[str, int]:
    """Rank -> bytes of whole layers and of keys and values that it has."""
    used = dict.fromkeys(RANKS, 0)
    for layer, layer_copies in enumerate(arrangement.layers):
        for shards in layer_copies:
            for rank in shards:
                used[rank] += weights[layer]
        for request, path in assignment.items():
            for rank, heads in held(arrangement, path, layer, kv[layer]).items():
                used[rank] += len(heads) * kv[layer].bytes_per_head(tokens[request])
    return used
