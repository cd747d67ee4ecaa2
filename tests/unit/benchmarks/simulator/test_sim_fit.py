"""What the simulator is told of ranks is what their steps took."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from sim_fit import Fitted, fit, messages_s, with_home
from sim_runs import TimedStep

from elastic.planning.estimate.layer_cost import LayerCost
from elastic.planning.pipeline.chunk_cost import Chunk
from elastic.sim.core.clock import VirtualClock
from elastic.sim.core.host import HostSharing, SharedHost
from elastic.sim.core.step_seconds import BehindPrompt

COST = LayerCost(((1, 0.004), (256, 0.024)), chunk=0.0, pair=0.0, prefix=0.0, seen=1e-6, block=1)
FITTED = Fitted(COST, HostSharing(), (), {"run": 1.0})


def decoded(rank: int, begin_s: float, seconds: float, seen: int = 999) -> TimedStep:
    return TimedStep(rank, begin_s, begin_s + seconds, ((seen, 1),))


def test_what_home_does_beside_its_turn_is_a_line_over_chunks() -> None:
    steps = [decoded(1, float(i), 0.005) for i in range(20)]
    prompt = TimedStep(1, 30.0, 30.03, ((0, 64),))
    several = [
        TimedStep(1, 100.0 + i, 100.02 + i, ((32, 1),) * count, 0.02 - 4e-4 - 1e-4 * (count - 1))
        for i, count in enumerate((1, 2, 4, 8))
    ]
    found = with_home(FITTED, {"run": [*steps, prompt, *several]})
    assert (found.beside_s, found.beside_chunk_s) == pytest.approx((4e-4, 1e-4), rel=1e-3)


def test_what_home_does_while_its_core_is_shared_is_no_longer_for_that() -> None:
    alone = [replace(decoded(1, float(i), 0.005), turn_s=0.005 - 4e-4) for i in range(20)]
    both = [
        TimedStep(rank, 100.0 + i, 100.02 + i, ((32, 1),) * count, 0.02 - 2 * (4e-4 + 1e-4 * (count - 1)))
        for i, count in enumerate((1, 2, 4, 8))
        for rank in (1, 2)
    ]
    found = with_home(FITTED, {"run": [*alone, *both]})
    assert (found.beside_s, found.beside_chunk_s) == pytest.approx((4e-4, 1e-4), rel=1e-3)


def test_what_the_fleets_process_takes_is_not_taken_for_what_ranks_take_from_each_other() -> None:
    found = fit({"run": steps_beside(HostSharing(0.2, frontend_s=1e-3, cores=2))}, 1e-3)
    assert found.sharing.contention == pytest.approx(0.2)
    assert found.error < 0.01


def test_what_single_tokens_take_longer_behind_a_prompt_is_no_part_of_what_they_cost() -> None:
    steps, now, behind_prompt = [], 0.0, BehindPrompt(2e-3, 0.5)
    for number in range(1200):
        behind = number % 40 - 1  # a prompt, and 39 steps of single tokens
        shape = ((64 * (number % 7), 64 + number % 192),) if behind < 0 else ((number % 900, 1),)
        cost_s = COST.batch([Chunk("", *chunk) for chunk in shape]) + (
            0 if behind < 0 else behind_prompt.more_s(behind)
        )
        steps.append(TimedStep(1, now, now + cost_s, shape))
        now += cost_s
    found = fit({"run": steps})
    assert (found.behind_prompt.first_s, found.behind_prompt.kept) == pytest.approx((2e-3, 0.5), rel=0.02)
    assert found.cost.batch([Chunk("", 500, 1)]) == pytest.approx(COST.batch([Chunk("", 500, 1)]), rel=0.02)
    assert found.pace_over(["run"], steps) == pytest.approx(1.0, abs=2e-3)


def test_where_no_step_is_long_behind_a_prompt_all_tell_what_tokens_cost() -> None:
    shapes = [((0, 64 + number % 192),) if number % 11 == 0 else ((number % 900, 1),) for number in range(600)]
    steps = [
        TimedStep(1, float(i), i + COST.batch([Chunk("", *chunk) for chunk in shape]), shape)
        for i, shape in enumerate(shapes)
    ]
    found = fit({"run": steps})
    assert found.behind_prompt.first_s == 0
    assert found.cost.batch([Chunk("", 500, 1)]) == pytest.approx(COST.batch([Chunk("", 500, 1)]), rel=0.02)


def steps_beside(sharing: HostSharing) -> list[TimedStep]:
    """Steps of two ranks, of which the second one computes half of the time."""
    made: list[TimedStep] = []
    host = SharedHost(clock := VirtualClock(), sharing)
    choose = random.Random(0)

    def begin(rank: int, left: int) -> None:
        count = choose.choice((1, 1, 1, 2, 16, 64, 256))
        begin_s, seconds = clock.now, COST.batch([Chunk("", 0, count)])

        def end() -> None:
            made.append(TimedStep(rank, begin_s, clock.now, ((0, count),)))
            host.take_message()
            if left:
                begin(rank, left - 1)

        host.compute(seconds, end)

    begin(1, 400)
    clock.at(2.0, lambda: begin(2, 200))
    clock.run()
    return made


def test_paces_are_means_over_steps_without_a_gap() -> None:
    steps = [decoded(7, 10.0, 0.5), decoded(7, 10.5, 1.0), decoded(7, 12.0, 0.5)]
    cost_s = COST.batch(steps[0].as_chunks)
    (own,) = FITTED.paces_of(steps, 10.0, 0.0).values()
    assert [own.seconds(at_s, cost_s) for at_s in (0.0, 0.5, 2.0)] == pytest.approx([0.5, 1.0, 0.5])
    (mean,) = FITTED.paces_of(steps, 10.0, 1.0).values()
    assert [mean.seconds(at_s, cost_s) for at_s in (0.0, 0.5, 2.0)] == pytest.approx([0.75, 0.75, 0.5])


def test_messages_take_as_long_as_requests_wait_that_come_when_no_rank_computes() -> None:
    steps = [decoded(1, 1.0, 0.5), decoded(2, 1.2, 1.0), decoded(1, 3.01, 0.5)]
    assert messages_s([0.9, 1.6, 2.1, 3.0, 9.0], steps) == pytest.approx([0.1, 0.01])
