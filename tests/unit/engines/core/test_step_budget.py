"""Steps of equal cost: what a queue is cut into, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastic.engines.core.step_budget import CostBudget, TokenBudget
from elastic.errors import ConfigError
from elastic.planning.pipeline.chunk_cost import Chunk, ChunkCost
from support.planning.halving import halve
from support.planning.pipelines import bubbles, by_tokens, heavy_tail, tokens

COST = ChunkCost(prefix=1e-6, own=1e-6, token=2e-4, chunk=1e-3, shared=5e-4)
PROMPTS = st.lists(st.integers(1, 6000), min_size=1, max_size=12)
LEAST, UNBOUNDED = 64, 1 << 30


@st.composite
def queues(draw: st.DrawFn) -> list[Chunk]:
    """Prompts, some of them begun."""
    sizes = st.one_of(st.integers(1, 40), st.integers(1, 3000), st.just(1))
    drawn = draw(st.lists(st.tuples(st.sampled_from([0, 0, 17, 4000]), sizes), min_size=1, max_size=20))
    return [Chunk(str(i), start, count) for i, (start, count) in enumerate(drawn)]


def steps(budget: CostBudget | TokenBudget, prompts: Sequence[int | Chunk]) -> list[list[Chunk]]:
    """Cut a queue as the scheduler does: in order, so many tokens a step."""
    queue = [Chunk(str(i), 0, each) if isinstance(each, int) else each for i, each in enumerate(prompts)]
    batches = []
    while queue:
        left, batch = budget.tokens((), iter(queue)), []
        while queue and left:
            request, start, count = queue.pop(0)
            taken = min(count, left)
            batch.append(Chunk(request, start, taken))
            left -= taken
            if taken < count:
                queue.insert(0, Chunk(request, start + taken, count - taken))
        batches.append(batch)
    return batches


@given(PROMPTS)
def test_tokens_are_conserved_and_their_order_is_kept(prompts: list[int]) -> None:
    batches = steps(CostBudget(COST, 32, 4096), prompts)
    chunks = [chunk for batch in batches for chunk in batch]
    assert sum(chunk.tokens for chunk in chunks) == sum(prompts)
    assert [int(chunk.request) for chunk in chunks] == sorted(int(chunk.request) for chunk in chunks)


@given(st.integers(2000, 8000))
def test_the_steps_of_one_long_prompt_cost_the_same(prompt: int) -> None:
    costs = [COST.batch(batch) for batch in steps(CostBudget(COST, 128, 8192), [prompt])[:-1]]
    assert max(costs) <= 1.1 * min(costs)


def with_next_token(batch: list[Chunk], after: list[Chunk]) -> list[Chunk]:
    """A step that has the first token of the one behind it, too: less than a token cannot be moved."""
    (request, start, count), following = batch[-1], after[0]
    if request == following.request:
        return [*batch[:-1], Chunk(request, start, count + 1)]
    return [*batch, Chunk(following.request, following.start, 1)]


@given(queues())
@example([Chunk(str(i), *each) for i, each in enumerate([(4000, 1), (0, 75), (17, 141), (0, 60), (4000, 1)])])
def test_the_steps_of_a_queue_cost_the_same_where_they_have_more_than_the_least(queue: list[Chunk]) -> None:
    """But for a token: the first one behind a long beginning costs as much as many others."""
    batches = steps(CostBudget(COST, LEAST, UNBOUNDED), queue)
    if len(batches) > 1 and min(map(tokens, batches[:-1])) > LEAST:
        most = max(COST.batch(batch) for batch in batches[:-1])
        for batch, after in pairwise(batches):
            assert most <= 1.1 * COST.batch(with_next_token(batch, after))


@given(st.integers(0, 1000))
def test_on_heavy_tails_steps_cost_the_same_and_no_more_than_by_figure_11(seed: int) -> None:
    queue = heavy_tail(seed)
    costs = [COST.batch(batch) for batch in steps(CostBudget(COST, 128, UNBOUNDED), queue)]
    assert max(costs) <= 1.1 * min(costs[:-1])
    assert max(costs) <= 1.05 * max(map(COST.batch, halve(queue, COST, 128)))


def test_on_heavy_tails_stages_wait_less_than_by_tokens() -> None:
    cost = ChunkCost(2e-8, 2e-8, 2e-5, 1e-4, 1e-4)
    ours = theirs = 0.0
    for seed in range(30):
        queue = heavy_tail(seed)
        even = steps(CostBudget(cost, 128, UNBOUNDED), queue)
        filled = by_tokens(queue, -(-tokens(queue) // len(even)))
        ours, theirs = ours + bubbles(even, cost), theirs + bubbles(filled, cost)
    assert ours <= 0.1 * theirs


@pytest.mark.parametrize("least", [100, 200, 400])
def test_equal_prompts_are_cut_as_by_tokens(least: int) -> None:
    queue = [Chunk(str(i), 0, 100) for i in range(24)]
    assert list(map(tuple, steps(CostBudget(COST, least, UNBOUNDED), queue))) == list(by_tokens(queue, least))


def test_with_a_usual_number_short_prompts_are_cut_as_by_tokens() -> None:
    queue = [Chunk(str(i), 0, 64) for i in range(32)]
    assert list(map(tuple, steps(CostBudget(COST, 64, 256, 256), queue))) == list(by_tokens(queue, 256))
    assert len(steps(CostBudget(COST, 64, 256), queue)) == 32
    assert CostBudget(COST, 64, 256, 256).tokens((), [Chunk("short", 0, 90), Chunk("shorter", 0, 70)]) == 160


@given(st.integers(0, 1000))
def test_with_a_usual_number_steps_are_fewer_and_cost_the_same(seed: int) -> None:
    """Where the last 64 tokens of a prompt cost no more than its first 256."""
    cost = ChunkCost(2e-8, 2e-8, 2e-5, 1e-4, 1e-4)
    queue = [chunk for chunk in heavy_tail(seed) if chunk.tokens <= 2000]
    few, many = (steps(CostBudget(cost, 64, 256, usual), queue) for usual in (256, None))
    costs = [cost.batch(batch) for batch in few[:-1]]
    assert len(few) <= len(many)
    assert max(costs, default=1.0) <= 1.1 * min(costs, default=1.0)


def test_what_comes_later_goes_with_the_share_of_the_queue_or_raises_it() -> None:
    budget, long, short = CostBudget(COST, 64, UNBOUNDED), Chunk("long", 0, 3000), Chunk("short", 0, 2000)
    share = budget.tokens((), [long])
    assert budget.tokens((), [Chunk("long", 2990, 10), short]) > 10 + 64
    assert budget.tokens((), [short]) < share  # of the long one nothing is left
    assert budget.tokens((), [short, long]) == share


def test_steps_of_as_many_tokens_do_not() -> None:
    costs = [COST.batch(batch) for batch in steps(TokenBudget(512), [8192])]
    assert max(costs) > 3 * min(costs)


@given(PROMPTS, st.integers(1, 64))
def test_a_step_has_the_least_and_never_more_than_the_most(prompts: list[int], least: int) -> None:
    batches = steps(CostBudget(COST, least, 512), prompts)
    counts = [sum(chunk.tokens for chunk in batch) for batch in batches]
    assert max(counts) <= 512
    assert all(count >= least for count in counts[:-1])


def test_what_decodes_is_of_the_share() -> None:
    budget, queue = CostBudget(COST, 64, 4096), [Chunk("a", 0, 3000), Chunk("b", 0, 3000)]
    alone, beside = budget.tokens((), queue), budget.tokens([2000] * 16, queue)
    assert beside - 16 < alone
    assert budget.tokens([2000] * 5000, queue) == 4096


def test_without_prompts_the_bound_is_all_there_is() -> None:
    assert CostBudget(COST, 64, 512).tokens([100, 200], ()) == 512
    assert TokenBudget(256).tokens([1], [Chunk("a", 0, 9)]) == 256


@pytest.mark.parametrize("usual", [63, 513])
def test_a_usual_number_that_cannot_be_is_refused(usual: int) -> None:
    with pytest.raises(ConfigError, match=f"usual={usual}"):
        CostBudget(COST, 64, 512, usual)


@pytest.mark.parametrize("least", [0, 513])
def test_a_least_that_cannot_be_is_refused(least: int) -> None:
    with pytest.raises(ConfigError, match=f"least={least}"):
        CostBudget(COST, least, 512)
