"""What is asked of ranks about their weights before any layer changes its rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from elastic.cluster.control.messages import Apply
from elastic.cluster.control.stage_questions import WeightDigests
from elastic.cluster.fleet.groups.group import Group
from elastic.cluster.fleet.groups.ranks import Ranks
from elastic.errors import ElasticError, RankLost, StateError
from elastic.types import Drop


def compare_weights(ranks: Ranks, group: Group) -> None:
    """Have ranks note what their weights are, and compare them, once. Raises `StateError` where they are not equal.

    They were when the ranks joined; but only a layer that comes back as it was can be dropped.
    """
    if group.compared:
        return
    asked = {rank: WeightDigests(tuple(sorted(shards))) for rank, shards in group.shape.weights.items()}
    first: dict[int, tuple[str, int]] = {}
    for rank, digests in ranks.ask_all(asked).items():
        for shard, digest in digests.items():
            other, expected = first.setdefault(shard, (rank, digest))
            if digest != expected:
                raise StateError(
                    f"layer {shard // group.shape.shards} of rank {rank!r} has other weights than that of {other!r}; "
                    "start them anew"
                )
    group.compared = True


def require_droppable(ranks: Ranks, leaving: Mapping[str, Collection[int]]) -> None:
    """Raise `StateError` where a rank could not drop the weights of shards, as it says: nothing is dropped.

    Layers with adapters or replicas, that were written, or share parameters, stay; those in a variant are restored
    before. `leaving`: rank -> shards.
    """
    drops = {rank: Drop(shards=tuple(sorted(shards)), after_restore=True) for rank, shards in leaving.items() if shards}
    asked = {rank: Apply((drop,), dry_run=True) for rank, drop in drops.items()}
    for rank, answer in zip(asked, ranks.answers(asked.items()), strict=True):
        if isinstance(answer, RankLost):
            raise answer
        if isinstance(answer, ElasticError):
            raise StateError(f"rank {rank!r} cannot drop its weights: {answer}")
