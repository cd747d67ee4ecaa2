"""A queue of chunks as microbatches of a pipeline. Order is kept, tokens are conserved; only where to cut is chosen.

KunServe, section 4.3, figures 9 to 11. By tokens, a batch that is late in a long prompt takes longer than one of the
same size that is early. Lookahead cuts so that batches cost the same. It cuts a queue that is known as a whole; ranks,
whose queue has changed by the next step, do the same step by step (`elastic.engines.core.step_budget.CostBudget`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from elastic.errors import ConfigError
from elastic.planning.pipeline.chunk_cost import Chunk, ChunkCost, larger_root

Batch = tuple[Chunk, ...]
ROUNDS = 40
"""Halvings of the interval in which the common cost of batches is looked for."""
LEVELLINGS = 8
"""Rounds in which neighbours are made alike."""


def lookahead(
    chunks: Sequence[Chunk], cost: ChunkCost, minimum: int, parts: int | None = None, base: Sequence[float] = ()
) -> tuple[Batch, ...]:
    """Divide a queue into microbatches of equal cost, of `minimum` tokens at least.

    Without `parts` as many as halving gives (figure 11), with it so many, fewer where there are not enough tokens.
    Both ways of cutting are tried where they give as many batches; the one whose slowest batch is faster is taken.
    `base` is what batches cost already, such as the decode steps of a cohort, one value for each part. Raises
    `ConfigError` for a minimum or parts below 1, and for a base that does not have one value for each part.
    """
    if minimum < 1 or (parts is not None and parts < 1):
        raise ConfigError(f"minimum={minimum}, parts={parts} must be at least 1")
    if base and len(base) != parts:
        raise ConfigError(f"base has {len(base)} values; give one for each of parts={parts}")
    chunks = tuple(chunk for chunk in chunks if chunk.tokens)
    if not chunks:
        return ()
    if base:
        return cut_evenly(chunks, cost, len(base), base)
    halves = halve(chunks, cost, minimum)
    tokens = sum(chunk.tokens for chunk in chunks)
    count = len(halves) if parts is None else max(1, min(parts, tokens // minimum))
    even = cut_evenly(chunks, cost, count)
    if len(halves) != len(even) or _slowest(even, cost) <= _slowest(halves, cost):
        return even
    return halves


def halve(chunks: Sequence[Chunk], cost: ChunkCost, minimum: int) -> tuple[Batch, ...]:
    """Cut every batch into two of equal cost, again and again, while all have `minimum` tokens. (Figures 10 and 11)

    The printed code tests the first batch only. All are tested here, and all are cut or none: else batches that were
    cut less often would cost twice as much.
    """
    batches: tuple[Batch, ...] = (tuple(chunks),)
    while True:
        halves = tuple(half for batch in batches for half in _split(batch, cost))
        if min(sum(chunk.tokens for chunk in half) for half in halves) < minimum:
            return batches
        batches = halves


def cut_evenly(chunks: Sequence[Chunk], cost: ChunkCost, parts: int, base: Sequence[float] = ()) -> tuple[Batch, ...]:
    """Cut into so many batches whose cost, with their `base`, is the same as far as whole tokens allow.

    Any number is possible, not only powers of two; there are fewer only where there are fewer tokens. With `base` there
    are as many as it has values: those that cost more already than the others will are empty.
    """
    tokens = sum(chunk.tokens for chunk in chunks)
    before = list(base) or [0.0] * min(parts, tokens)
    least = 0 if base else 1
    low, high = 0.0, cost.batch(chunks) + max(before)
    best = _fill(chunks, cost, math.inf, before, least)
    assert best is not None
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        batches = _fill(chunks, cost, middle, before, least)
        if batches is None:
            low = middle
        else:
            best, high = batches, middle
        if high - low <= 1e-4 * high:
            break
    return best if base else _level(best, cost)


def _fill(
    chunks: Sequence[Chunk], cost: ChunkCost, limit: float, base: Sequence[float], least: int
) -> tuple[Batch, ...] | None:
    """Fill batches, of `least` tokens at least, up to a cost each; None if the last one cannot have what is left."""
    queue = list(reversed(chunks))
    left = sum(chunk.tokens for chunk in chunks)
    batches: list[Batch] = []
    for number, before in enumerate(base):
        batch: list[Chunk] = []
        room, most = limit - before, left - least * (len(base) - number - 1)
        while queue and most:
            chunk = queue.pop()
            shared = cost.shared if batch else 0.0
            price = cost(chunk) - shared
            count = chunk.tokens if price <= room else cost.tokens_within(chunk, room + shared)
            part, rest = chunk.cut(min(count, most))
            if part.tokens:
                batch.append(part)
                most -= part.tokens
                left -= part.tokens
            if rest.tokens:
                queue.append(rest)
                break
            room -= price
        batches.append(tuple(batch))
    return None if queue else tuple(batches)


def _level(batches: Sequence[Batch], cost: ChunkCost) -> tuple[Batch, ...]:
    """Divide neighbours anew where that makes the slower one faster: rounding to tokens leaves the last one too few."""
    level = list(batches)
    for _ in range(LEVELLINGS):
        for left in reversed(range(len(level) - 1)):
            pair = level[left : left + 2]
            halves = _split(_joined(*pair), cost)
            if all(halves) and _slowest(halves, cost) < _slowest(pair, cost):
                level[left : left + 2] = halves
    return tuple(level)


def _joined(first: Batch, second: Batch) -> Batch:
    """Put two neighbours together again, and the chunk that was cut between them."""
    last, following = first[-1], second[0]
    if last.request != following.request:
        return first + second
    return (*first[:-1], last._replace(tokens=last.tokens + following.tokens), *second[1:])


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


def _slowest(batches: Sequence[Batch], cost: ChunkCost) -> float:
    return max(map(cost.batch, batches))
