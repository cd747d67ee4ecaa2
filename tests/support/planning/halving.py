"""Cuts of a queue that is known as a whole (KunServe, figure 11), which steps of equal cost are held against."""

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


def cut_evenly(chunks: Sequence[Chunk], cost: ChunkCost, parts: int) -> tuple[Batch, ...]:
    """Cut a queue into so many batches at the most, by any number of cuts, the dearest of which costs the least."""
    low, high = 0.0, cost.batch(chunks)
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_filled(tuple(chunks), cost, middle)) <= parts else (middle, high)
    return _filled(tuple(chunks), cost, high)


def _filled(rest: Batch, cost: ChunkCost, seconds: float) -> tuple[Batch, ...]:
    """Fill batches in order, each with what costs so much, but with a token at the least."""
    batches = []
    while rest:
        batch, rest = _first(rest, cost, seconds)
        batches.append(batch)
    return tuple(batches)


def _first(chunks: Batch, cost: ChunkCost, seconds: float) -> tuple[Batch, Batch]:
    """Cut a queue behind the first tokens that cost so much as a batch, or behind the first one if that costs more."""
    paid = 0.0
    for number, chunk in enumerate(chunks):
        price = cost(chunk) - paid
        if price > seconds:
            first, second = chunk.cut(max(cost.tokens_within(chunk, seconds + paid), int(number == 0)))
            behind = (*(second,) * (second.tokens > 0), *chunks[number + 1 :])
            return (*chunks[:number], *(first,) * (first.tokens > 0)), behind
        seconds, paid = seconds - price, cost.shared
    return chunks, ()
