"""KunServe's figure 11, over a queue that is known as a whole: what steps of equal cost are held against."""

from __future__ import annotations

import math
from collections.abc import Sequence

from elastic.planning.pipeline.chunk_cost import Chunk, ChunkCost, larger_root

Batch = tuple[Chunk, ...]


def halve(chunks: Sequence[Chunk], cost: ChunkCost, minimum: int) -> tuple[Batch, ...]:
    """Cut every batch into two of equal cost, again and again, while all have `minimum` tokens.

    The printed code tests the first batch only. All are tested here, and all are cut or none: else batches that were
    cut less often would cost twice as much.
    """
    batches: tuple[Batch, ...] = (tuple(chunks),)
    while True:
        halves = tuple(half for batch in batches for half in _split(batch, cost))
        if min(sum(chunk.tokens for chunk in half) for half in halves) < minimum:
            return batches
        batches = halves


def _split(batch: Batch, cost: ChunkCost) -> tuple[Batch, Batch]:
    """Cut a batch into two of equal cost; the second part of a request that is cut has a longer prefix."""
    prices = [cost(chunk) - cost.shared for chunk in batch]
    before, behind = 0.0, math.fsum(prices)
    for number, (chunk, price) in enumerate(zip(batch, prices, strict=True)):
        behind -= price
        if before + price >= behind or number == len(batch) - 1:
            first, second = chunk.cut(_balance(chunk, cost, behind - before))
            return (*batch[:number], *(first,) * (first.tokens > 0)), (
                *(second,) * (second.tokens > 0),
                *batch[number + 1 :],
            )
        before += price
    return batch, ()


def _balance(chunk: Chunk, cost: ChunkCost, more: float) -> int:
    """Return where to cut a chunk so that its first part costs `more` more than the second one.

    With n tokens behind p, f(c) = prefix p c + own (c² + c) + token c + read p, and g(c) the same for n - c behind
    p + c: f(c) - g(c) = more is a quadratic equation in c.
    """
    _, start, count = chunk
    square = cost.prefix  # c² of own cancels; prefix (p c - (p + c) (n - c)) has prefix c²
    linear = 2 * cost.own * (count + 1) + 2 * cost.token + cost.prefix * (2 * start - count) - cost.read
    constant = -count * (cost.own * (count + 1) + cost.token + cost.prefix * start) - more
    return max(0, round(min(count, larger_root(square, linear, constant))))
