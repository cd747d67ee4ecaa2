"""How far the cost of chunks is from what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.planning.pipeline.chunk_cost import BatchTiming, Chunk, ChunkCost


def relative_errors(cost: ChunkCost, samples: Sequence[BatchTiming]) -> list[float]:
    """Return |predicted / measured - 1| of each sample."""
    batches = [([Chunk("", start, count) for start, count in s.chunks], s.seconds) for s in samples]
    return [abs(cost.batch(chunks) / seconds - 1) for chunks, seconds in batches]
