"""How the benchmark of microbatches cuts: by cost as engines do it, and by plans of the whole queue."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[4] / "benchmarks"))

import microbatches
from planned_steps import PlannedSteps, by_halves, by_number

from elastic.engines.continuous import ContinuousEngine
from elastic.engines.pipeline.turn import StageTimes
from elastic.planning.pipeline.chunk_cost import Chunk, ChunkCost
from support import architectures
from support.planning.halving import Batch, cut_evenly, halve
from support.planning.pipelines import heavy_tail, tokens
from support.wrapped_model import small

COST = ChunkCost(prefix=1e-6, own=1e-6, token=2e-4, chunk=1e-3, shared=5e-4)


def test_steps_of_equal_cost_are_those_of_engines(wrapped: Any) -> None:
    model = architectures.build("qwen3")
    wrapped(model, small(8 << 20))
    engine = ContinuousEngine(model, max_batch_tokens=256)
    engine.cohorts.use_cost(COST)
    budget = engine._loop.scheduler.budget
    engine.stop(drain=False)
    assert budget.pipelined == microbatches.ways_of(COST, [256])["cost 256, own number"].budget  # type: ignore[union-attr]


@pytest.mark.parametrize("plan", [by_halves, by_number])
def test_a_queue_is_cut_as_it_was_planned_also_by_two_batches_that_see_parts_of_it(plan: Any) -> None:
    queue = heavy_tail(3)
    planned = [tokens(batch) for batch in plan(queue, COST, 256)]
    assert len(planned) > 8
    budget = pickle.loads(pickle.dumps(PlannedSteps(plan, COST, 256, 1 << 30)))
    told = [budget.tokens((), iter(queue[: None if number % 2 else -1])) for number in range(1, len(planned) + 1)]
    assert told == planned


def test_a_plan_is_made_anew_for_what_comes_and_holds_no_more_than_a_step_may() -> None:
    budget, long, short = PlannedSteps(by_number, COST, 256, 300), Chunk("long", 0, 1024), Chunk("short", 0, 64)
    assert budget.tokens((), [short]) == 64
    assert tokens(by_number([short, long], COST, 256)[0]) > 300
    assert budget.tokens((), [short, long]) == 300
    assert budget.tokens([7] * 290, [long]) == 290 + 10
    assert budget.tokens([7], ()) == 300


@pytest.mark.parametrize("seed", range(20))
def test_a_queue_is_cut_into_a_number_of_batches_of_equal_cost(seed: int) -> None:
    queue = heavy_tail(seed)
    halves = halve(queue, COST, 64)
    batches = cut_evenly(queue, COST, len(halves))
    assert len(batches) == len(halves)
    assert joined(batches) == queue
    costs = [COST.batch(batch) for batch in batches]
    assert max(costs) <= 1.1 * min(costs[:-1]), "the last one has what is left"
    assert max(costs) <= 1.05 * max(map(COST.batch, halves))


def joined(batches: Sequence[Batch]) -> list[Chunk]:
    """Put chunks together that follow each other in a request."""
    whole: list[Chunk] = []
    for chunk in (chunk for batch in batches for chunk in batch):
        if whole and whole[-1].request == chunk.request:
            assert whole[-1].start + whole[-1].tokens == chunk.start
            whole[-1] = whole[-1]._replace(tokens=whole[-1].tokens + chunk.tokens)
        else:
            whole.append(chunk)
    return whole


def test_bubbles_and_the_less_busy_stage_are_what_ranks_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the wall time, whatever cores were used for besides."""
    told = iter(
        [
            {"a": StageTimes(5.0, 1.0), "b": StageTimes(2.0, 2.0)},
            {"a": StageTimes(11.0, 2.0), "b": StageTimes(9.0, 5.0)},
        ]
    )
    monkeypatch.setattr(microbatches, "stage_times", lambda engine: next(told))
    clock = iter([100.0, 110.0])
    monkeypatch.setattr(microbatches.time, "perf_counter", lambda: next(clock))
    engine: Any = SimpleNamespace(status=lambda: SimpleNamespace(instances=[]))
    played = microbatches.play(engine, [])
    assert (played.bubbles, played.busy) == (pytest.approx(0.2), pytest.approx(0.6))


def test_the_best_of_each_kind_is_held_against_the_best_by_tokens() -> None:
    def figures(bubbles: float, tokens_per_s: float) -> microbatches.Figures:
        return microbatches.Figures([microbatches.Played(bubbles, 1 - bubbles, tokens_per_s, 1)] * 2)

    ways = microbatches.ways_of(COST, [128, 256])
    told = {name: figures(0.4, 10.0) for name in ways}
    told["tokens 256, two"], told["cost 128, two"] = figures(0.2, 20.0), figures(0.1, 25.0)
    compared = microbatches.compared(ways, told, "two")
    assert (compared["best"]["tokens"], compared["best"]["cost"]) == ("tokens 256, two", "cost 128, two")
    assert compared["bubbles_over_tokens"]["cost"]["median"] == 0.5
    assert compared["tokens_per_s_over_tokens"]["cost"]["median"] == 1.25
    assert compared["tokens_per_s_over_tokens"]["halves"]["median"] == 0.5
