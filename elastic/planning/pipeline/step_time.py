"""Seconds in which every running request gets one token, of instances that compute layers of each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastic.planning.pipeline.chunk_cost import Chunk, ModelCost


def shared_round_s(
    model: ModelCost,
    layers_at: Mapping[str, Mapping[str, float]],
    running: Mapping[str, Sequence[Chunk]],
    hops: Mapping[str, int],
    hop_s: float,
    depth: Mapping[str, float] | None = None,
) -> float:
    """Return the seconds of a round of instances that compute layers of each other: each has one step in flight.

    `layers_at`: rank -> instance -> how many of its layers it computes; what is not decoder layers each computes at its
    own rank. The round is over neither before the busiest rank has computed all that it has of it, nor before the
    slowest instance's step has passed all of its layers and `hops` between ranks. Of a layer that ranks share each has
    a part; `depth` is then how many layers the largest parts of an instance make up, one after another.
    """
    layer_s = {home: model.layer.batch(chunks) for home, chunks in running.items()}
    rest_s = {home: model.rest.batch(chunks) for home, chunks in running.items()}
    busiest = max(
        (sum(layer_s[home] * count for home, count in at.items()) + rest_s[rank] for rank, at in layers_at.items()),
        default=0.0,
    )
    deep = dict.fromkeys(running, float(model.layers)) if depth is None else depth
    passed = (deep[home] * layer_s[home] + rest_s[home] + hop_s * hops[home] for home in running if running[home])
    return max(busiest, max(passed, default=0.0))
