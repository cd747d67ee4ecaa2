"""Seconds in which every running request gets one token: of plain instances, of a pipeline, of layers in shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastic.planning.measured_cost import LinearLatency
from elastic.planning.pipeline.chunk_cost import Chunk, ModelCost


def plain_step_s(model: ModelCost, instances: Sequence[Sequence[Chunk]]) -> float:
    """Return the seconds of the slowest of some instances, each with its own requests."""
    return max((model.whole.batch(chunks) for chunks in instances), default=0.0)


def pipeline_step_s(
    model: ModelCost, layers: Sequence[int], cohorts: Sequence[Sequence[Chunk]], hop_s: float = 0.0
) -> float:
    """Return the seconds of a round of all cohorts through stages of so many layers each.

    A stage computes every cohort once; the round is over neither before the busiest stage has done that, nor before a
    cohort has passed all stages and its tokens have come back to the first one.
    """
    costs = [model.stage(count, last=number == len(layers) - 1) for number, count in enumerate(layers)]
    seconds = [[cost.batch(chunks) for cost in costs] for chunks in cohorts if chunks]
    hops = len(layers) * hop_s if len(layers) > 1 else 0.0
    busiest = max((sum(stage) for stage in zip(*seconds, strict=True)), default=0.0)
    return max(busiest, max((sum(batch) + hops for batch in seconds), default=0.0))


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


def sharded_step_s(
    model: ModelCost, parts: int, chunks: Sequence[Chunk], all_reduce: LinearLatency, token_bytes: int
) -> float:
    """Return the seconds of a step whose layers are cut into so many shards: two sums over them in each layer.

    `token_bytes` are those of one token's hidden states; what is not decoder layers is not cut.
    """
    sums = 2 * all_reduce(token_bytes * sum(chunk.tokens for chunk in chunks)) if parts > 1 else 0.0
    return model.layers * (model.layer.batch(chunks) / parts + sums) + model.rest.batch(chunks)
