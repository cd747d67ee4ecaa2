"""Seconds in which every running request gets one token: of plain instances, of a pipeline, of layers in shards."""

from __future__ import annotations

from collections.abc import Sequence

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


def sharded_step_s(
    model: ModelCost, parts: int, chunks: Sequence[Chunk], all_reduce: LinearLatency, token_bytes: int
) -> float:
    """Return the seconds of a step whose layers are cut into so many shards: two sums over them in each layer.

    `token_bytes` are those of one token's hidden states; what is not decoder layers is not cut.
    """
    sums = 2 * all_reduce(token_bytes * sum(chunk.tokens for chunk in chunks)) if parts > 1 else 0.0
    return model.layers * (model.layer.batch(chunks) / parts + sums) + model.rest.batch(chunks)
