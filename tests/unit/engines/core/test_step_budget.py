"""Steps of equal cost: what a queue is cut into, step by step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.engines.core.step_budget import CostBudget, TokenBudget
from elastic.errors import ConfigError
from elastic.planning.pipeline.chunk_cost import Chunk, ChunkCost

COST = ChunkCost(prefix=1e-6, own=1e-6, token=2e-4, chunk=1e-3, shared=5e-4)
PROMPTS = st.lists(st.integers(1, 6000), min_size=1, max_size=12)


def steps(budget: CostBudget | TokenBudget, prompts: list[int]) -> list[list[Chunk]]:
    """Cut a queue as the scheduler does: in order, so many tokens a step."""
    queue = [Chunk(str(number), 0, count) for number, count in enumerate(prompts)]
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


@pytest.mark.parametrize("least", [0, 513])
def test_a_least_that_cannot_be_is_refused(least: int) -> None:
    with pytest.raises(ConfigError, match=f"least={least}"):
        CostBudget(COST, least, 512)
