"""What the rounds of a transition need, and change at a pause."""

from __future__ import annotations

from collections.abc import Mapping

from elastic.cluster.fleet.groups.group import LayerFlip, Shape
from elastic.cluster.fleet.groups.transition import Books, FlipRound


def needed_at(rank: str, flips: FlipRound, books: Books, shape: Shape, caps: Mapping[str, int]) -> int:
    """Count the pages that the flips of a round take at a rank, all that it gets of an instance together."""
    coming: dict[str, LayerFlip] = {}
    for flip in flips:
        if flip.target == rank:
            before = coming[flip.home].shards if flip.home in coming else ()
            coming[flip.home] = flip._replace(shards=before + flip.shards)
    return sum(books.needed(flip, shape, caps) for flip in coming.values())


def layers_of_pauses(flips: FlipRound, shards: int) -> dict[str, set[int]]:
    """Return the layers that change at the pause of each instance; no rank both gives and gets at one."""
    found: dict[str, set[int]] = {}
    for flip in flips:
        found.setdefault(flip.home, set()).update(shard // shards for shard in flip.shards)
    for home in found:
        pause = [flip for flip in flips if flip.home == home]
        assert {flip.source for flip in pause}.isdisjoint(flip.target for flip in pause)
        assert len({(flip.source, flip.target) for flip in pause}) == len(pause)
    return found
