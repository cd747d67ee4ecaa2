from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastic.errors import ConfigError
from elastic.planning.pipeline.chunk_cost import Chunk, ChunkCost
from elastic.planning.pipeline.microbatches import Batch, cut_evenly, halve, lookahead
from support.planning.pipelines import by_tokens, run_pipeline

COST = ChunkCost(1e-7, 1e-7, 5e-5, 2e-4, 1e-3 / 8)
MINIMUM = 64
COSTS = st.builds(
    lambda alpha, own, token, chunk, shared, read: ChunkCost(alpha, own, token, chunk + shared, shared, read),
    st.floats(0, 1e-6),
    st.floats(0, 1e-6),
    st.floats(1e-6, 1e-4),
    st.floats(0, 1e-3),
    st.floats(0, 1e-3),
    st.floats(0, 1e-6),
)


@st.composite
def queues(draw: st.DrawFn, least: int = 1) -> list[Chunk]:
    """Prompts, some of them begun, and decode steps."""
    sizes = st.one_of(st.integers(1, 40), st.integers(1, 3000), st.just(1))
    drawn = draw(st.lists(st.tuples(st.sampled_from([0, 0, 17, 4000]), sizes), min_size=least, max_size=20))
    return [Chunk(f"r{i}", start, count) for i, (start, count) in enumerate(drawn)]


def tokens(batch: Sequence[Chunk]) -> int:
    return sum(chunk.tokens for chunk in batch)


def joined(batches: Sequence[Batch]) -> list[Chunk]:
    """The chunks with the parts of each request put together again, which must follow each other."""
    found: list[Chunk] = []
    for chunk in (chunk for batch in batches for chunk in batch):
        assert chunk.tokens
        last = found[-1] if found else None
        if last and last.request == chunk.request:
            assert last.start + last.tokens == chunk.start
            found[-1] = last._replace(tokens=last.tokens + chunk.tokens)
        else:
            found.append(chunk)
    return found


@given(queues(), COSTS, st.integers(1, 200), st.one_of(st.none(), st.integers(1, 9)), st.integers(1, 500))
def test_order_is_kept_and_tokens_are_conserved(
    queue: list[Chunk], cost: ChunkCost, minimum: int, parts: int | None, budget: int
) -> None:
    for batches in (
        by_tokens(queue, budget),
        lookahead(queue, cost, minimum, parts),
        halve(queue, cost, minimum),
        cut_evenly(queue, cost, parts or 3),
        lookahead(queue, cost, minimum, 3, base=[0.0, 1e-2, 3e-3]),
    ):
        assert joined(batches) == queue


@given(queues(), COSTS, st.integers(1, 9))
def test_as_many_batches_as_were_asked_for_and_none_is_too_small(
    queue: list[Chunk], cost: ChunkCost, parts: int
) -> None:
    found = cut_evenly(queue, cost, parts)
    assert len(found) == min(parts, tokens(queue))
    assert all(found)
    assert len(lookahead(queue, cost, MINIMUM, parts)) == max(1, min(parts, tokens(queue) // MINIMUM))
    halves = halve(queue, cost, MINIMUM)
    assert len(halves) & (len(halves) - 1) == 0
    assert len(halves) == 1 or min(map(tokens, halves)) >= MINIMUM


@given(queues(4), st.integers(1, 9))
@example([Chunk(f"r{i}", 4000 * (n == 1), n) for i, n in enumerate([2132, 1, 2, 2132, 2132, 2131])], 1)  # rounded alike
def test_batches_of_some_size_cost_the_same(queue: list[Chunk], parts: int) -> None:
    for batches in (lookahead(queue, COST, MINIMUM, parts), lookahead(queue, COST, MINIMUM)):
        costs = [COST.batch(batch) for batch in batches]
        if min(map(tokens, batches)) > MINIMUM:
            assert max(costs) <= 1.1 * min(costs)


def heavy_tail(seed: int, count: int = 40) -> list[Chunk]:
    """Lengths from 1 to 64 times the least; few are long."""
    choose = random.Random(seed)
    return [Chunk(str(i), 0, int(64 * min(64, choose.paretovariate(1.0)))) for i in range(count)]


def bubbles(batches: Sequence[Batch], cost: ChunkCost) -> float:
    return run_pipeline([[cost.batch(batch) / 2] * 2 for batch in batches]).bubbles


def test_on_heavy_tails_it_beats_batches_by_tokens() -> None:
    cost = ChunkCost(2e-8, 2e-8, 2e-5, 1e-4, 1e-4)
    ours, theirs, ideal = [], [], []
    for seed in range(30):
        queue = heavy_tail(seed)
        even = lookahead(queue, cost, MINIMUM, 8)
        filled = by_tokens(queue, -(-tokens(queue) // 8))
        assert len(even) == len(filled) == 8
        assert max(map(cost.batch, even)) <= max(map(cost.batch, filled)) * (1 + 1e-9)
        ours.append(bubbles(even, cost) - 1 / 9)
        theirs.append(bubbles(filled, cost) - 1 / 9)
        ideal.append(bubbles(even, cost))
    assert max(ideal) <= 1 / 9 + 0.01  # (s - 1) / (m + s - 1): nothing is lost but at the ends
    assert sum(ours) <= 0.4 * sum(theirs)


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_equal_prompts_are_cut_as_by_tokens(parts: int) -> None:
    queue = [Chunk(str(i), 0, 100) for i in range(24)]
    assert lookahead(queue, COST, MINIMUM, parts) == by_tokens(queue, 100 * 24 // parts)


def test_a_request_that_is_cut_has_a_longer_prefix_then() -> None:
    first, second = halve([Chunk("r", 0, 1000)], COST, 300)
    assert first[0].start == 0
    assert second[0].start == first[0].tokens > 500  # what is behind attends to it, too
    assert COST.batch(first) == pytest.approx(COST.batch(second), rel=1e-3)


def test_all_batches_are_tested_not_only_the_first() -> None:
    """The first half has few tokens behind a long prefix, the other one many: it alone could be cut again."""
    queue = [Chunk("long", 8000, 150), *(Chunk(str(i), 0, 100) for i in range(12))]
    batches = halve(queue, COST, 150)
    costs = [COST.batch(batch) for batch in batches]
    assert max(costs) <= 1.1 * min(costs)
    assert min(map(tokens, batches)) >= 150


def test_decode_steps_are_whole_and_what_cohorts_cost_already_is_made_up_for() -> None:
    queue = [Chunk(str(i), 0, 500) for i in range(8)]
    base = [COST.batch([Chunk("d", 3000, 1)] * 40), COST.batch([Chunk("d", 10, 1)] * 4)]
    batches = lookahead(queue, COST, MINIMUM, 2, base)
    totals = [COST.batch(batch) + more for batch, more in zip(batches, base, strict=True)]
    assert totals[0] == pytest.approx(totals[1], rel=1e-2)
    assert tokens(batches[0]) < tokens(batches[1])
    short = lookahead([Chunk("r", 0, 4)], COST, 1, 2, base)
    assert short == ((), (Chunk("r", 0, 4),))


def test_a_cost_without_attention_is_cut_by_tokens() -> None:
    cost = ChunkCost(0, 0, 1e-3, 0, 0)
    queue = [Chunk("a", 0, 300), Chunk("b", 50, 700)]
    assert [tokens(batch) for batch in lookahead(queue, cost, 1, 4)] == [250] * 4
    assert [tokens(batch) for batch in halve(queue, cost, 250)] == [250] * 4


def test_where_tokens_cost_nothing_chunks_stay_whole() -> None:
    queue = [Chunk("a", 0, 8), Chunk("b", 0, 8)]
    assert halve(queue, ChunkCost(0, 0, 0, 1e-3, 0), 4) == ((queue[0],), (queue[1],))


def test_nothing_to_cut_and_what_cannot_be() -> None:
    assert lookahead([], COST, 1) == ()
    assert lookahead([Chunk("r", 0, 0)], COST, 1, 3) == ()
    for arguments in ((0, None, ()), (1, 0, ()), (1, 2, (0.0,))):
        with pytest.raises(ConfigError):
            lookahead([Chunk("r", 0, 5)], COST, *arguments)
