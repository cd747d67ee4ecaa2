"""Fleets in simulated time: the real scheduler and dispatcher, driven by events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import pytest

from elastic.cluster.fleet.instance import Instance
from elastic.engines.base import Output, Request
from elastic.planning.estimate.roofline import BatchCost
from elastic.planning.pipeline.chunk_cost import ChunkCost
from elastic.sim.core.clock import VirtualClock
from elastic.sim.core.executor import STOP
from elastic.sim.core.fleet import RankModel, SimulatedFleet
from elastic.sim.core.host import HostSharing
from elastic.sim.core.instance import EngineOptions, PlacePages
from elastic.sim.core.step_seconds import BehindPrompt, MeasuredPace
from support.sim.fixed_seconds import FixedSeconds

COST = ChunkCost(prefix=2e-7, own=1e-7, token=1e-4, chunk=5.5e-3, shared=5e-3)


class Told:
    """Outputs of a request, as its listener gets them."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []

    def __call__(self, output: Output) -> None:
        self.outputs.append(output)

    @property
    def tokens(self) -> int:
        return sum(len(output.tokens) for output in self.outputs)


def fleet(cost: BatchCost, instances: int = 1, *, blocks: int = 100, **options: Any) -> SimulatedFleet:
    model = RankModel(EngineOptions(4, 8, 16), PlacePages(blocks + 10, 10, 1), cost, **options)
    return SimulatedFleet(VirtualClock(), model, instances)


def play(made: SimulatedFleet, arrivals: Sequence[tuple[float, int, int]]) -> list[Told]:
    """Submit (seconds, prompt, answer) and return what was told of each."""
    told = []
    for at_s, prompt, answer in arrivals:
        told.append(Told())
        request = Request((1,) * prompt, answer, stop_tokens=(STOP,), id=f"q{len(told)}")
        made.clock.at(at_s, lambda request=request, listener=told[-1]: made.submit(request, listener))  # type: ignore[misc]
    made.clock.run()
    made.check()
    return told


def test_seconds_of_a_request_are_those_of_its_steps() -> None:
    (told,) = play(fleet(FixedSeconds(0.5)), [(1.0, 20, 5)])  # two chunks of the prompt, then four tokens
    assert [output.at_s for output in told.outputs] == [2.0, 2.5, 3.0, 3.5, 4.0]
    assert told.outputs[-1].finish == "length"
    assert told.outputs[0].scheduled_s == 1.0


@pytest.mark.parametrize("stretch_s", [0.0, 100.0])
def test_steps_of_single_tokens_take_longer_behind_a_prompt(stretch_s: float) -> None:
    made = fleet(FixedSeconds(0.5), behind_prompt=BehindPrompt(0.4, 0.5), stretch_s=stretch_s)
    first, second = play(made, [(0.0, 9, 60), (20.1, 9, 1)])
    single = [output.at_s for output in first.outputs[:5]]
    assert single == pytest.approx([0.5, 1.4, 2.1, 2.7, 3.25])  # by 0.4, 0.2, 0.1, 0.05
    assert 20.1 < second.outputs[0].at_s < first.outputs[-1].at_s
    whole_s = 0.5 * 60 + 2 * 0.8  # and so again behind the second prompt, whose step has a token of the first, too
    assert first.outputs[-1].at_s == pytest.approx(whole_s)


def test_requests_wait_until_blocks_come_free() -> None:
    first, second = play(fleet(FixedSeconds(0.5), blocks=10), [(0.0, 20, 20), (0.1, 20, 20)])
    assert second.outputs[0].at_s > first.outputs[-1].at_s
    assert second.tokens == 20


def test_two_instances_serve_side_by_side() -> None:
    first, second = play(fleet(FixedSeconds(0.5), 2, blocks=10), [(0.0, 20, 20), (0.1, 20, 20)])
    assert second.outputs[-1].at_s == pytest.approx(first.outputs[-1].at_s + 0.1)


def test_ranks_of_a_host_slow_each_other_down_while_both_compute() -> None:
    made = fleet(FixedSeconds(0.5), 2, blocks=10, sharing=HostSharing(0.6), stretch_s=5.0)
    first, second = play(made, [(0.0, 9, 1), (0.2, 9, 4)])
    assert first.outputs[-1].at_s == pytest.approx(0.2 + 0.3 * 1.6)
    assert [output.at_s for output in second.outputs][:2] == pytest.approx([0.88, 1.38])


def test_the_fleets_process_takes_a_core_from_ranks_that_compute_on_all_of_them() -> None:
    sharing = HostSharing(frontend_s=0.2, cores=2)
    alone, _ = play(fleet(FixedSeconds(0.5), 1, sharing=sharing, stretch_s=5.0), [(0.0, 9, 3), (9.0, 9, 1)])
    assert [output.at_s for output in alone.outputs] == [0.5, 1.0, 1.5]
    first, second = play(fleet(FixedSeconds(0.5), 2, blocks=10, sharing=sharing), [(0.0, 9, 1), (0.2, 9, 2)])
    assert first.outputs[-1].at_s == pytest.approx(0.5)
    assert [output.at_s for output in second.outputs] == pytest.approx([0.7, 1.2])  # nobody else computes then
    both = play(fleet(FixedSeconds(0.5), 2, blocks=10, sharing=sharing), [(0.0, 9, 2), (0.2, 9, 2)])
    assert [told.outputs[-1].at_s for told in both] == pytest.approx([1.2, 1.4])  # half of two messages each


def test_at_the_pace_of_another_run_all_is_told_when_it_was_told_there() -> None:
    arrivals = [(0.3, 20, 9), (0.4, 9, 20), (0.9, 40, 5)]
    noisy, steps = fleet(COST, noise=0.5), []
    local = noisy.instances["r0"].local
    compute, batch = local.host.compute, Mock(wraps=COST.batch)

    def note(seconds: float, done: Callable[[], object]) -> None:
        steps.append((noisy.clock.now, noisy.clock.now + seconds, COST.batch(batch.call_args.args[0])))
        compute(seconds, done)

    local.cost = Mock(batch=batch)
    local.host.compute = note  # type: ignore[method-assign]
    real = play(noisy, arrivals)
    paced = play(fleet(COST, paces={"r0": MeasuredPace(steps)}), arrivals)
    for one, other in zip(real, paced, strict=True):
        assert [output.at_s for output in other.outputs] == pytest.approx([output.at_s for output in one.outputs])


def test_what_ended_is_in_use_until_that_is_told_and_free_at_once_behind_it() -> None:
    made, used = fleet(FixedSeconds(0.5), blocks=10), []
    (instance,) = made.dispatcher.instances.values()
    heard = made.dispatcher.heard

    def note(of: Instance, message: Any) -> None:
        used.append((made.clock.now, message.load.total_blocks - message.load.free_blocks))
        heard(of, message)

    made.dispatcher.heard = note  # type: ignore[method-assign]
    play(made, [(0.0, 5, 2)])
    assert used == [(0.5, 2), (1.0, 2), (1.0, 0)]
    assert instance.load.free_blocks == 10


@pytest.mark.parametrize("arrivals", [[(0.0, 20, 40)], [(0.0, 9, 90), (0.3, 20, 40), (0.31, 3, 3), (0.7, 40, 17)]])
def test_a_stretch_of_steps_ends_when_each_by_itself_does(arrivals: list[tuple[float, int, int]]) -> None:
    plain, stretched = fleet(COST), fleet(COST, stretch_s=10.0)
    for one, other in zip(play(plain, arrivals), play(stretched, arrivals), strict=True):
        assert other.tokens == one.tokens
        assert other.outputs[0].at_s == pytest.approx(one.outputs[0].at_s)
        assert other.outputs[-1].at_s == pytest.approx(one.outputs[-1].at_s)
    assert stretched.clock.events < plain.clock.events / 2


def test_an_answer_ends_before_the_most_that_it_may_have() -> None:
    made = fleet(COST, stretch_s=10.0)
    made.answers["q1"] = 7
    (told,) = play(made, [(0.0, 20, 40)])
    assert told.tokens == 7
    assert told.outputs[-1].finish == "stop"


@pytest.mark.parametrize("way", ["recompute", "swap"])
@pytest.mark.parametrize("stretch_s", [0.0, 5.0])
def test_what_is_evicted_goes_on_and_takes_longer(way: str, stretch_s: float) -> None:
    pages, told = PlacePages(20, 10, 1), []
    for eviction in ("none", way):
        options = EngineOptions(4, 8, 16, eviction=eviction, swap_token_s=1e-3)
        model = RankModel(options, pages, COST, stretch_s=stretch_s)
        made = SimulatedFleet(VirtualClock(), model, 1, at_once=True)
        told.append(play(made, [(0.0, 8, 20), (0.001, 8, 20), (0.002, 8, 20)]))
        (instance,) = made.instances.values()
        assert [each.tokens for each in told[-1]] == [20, 20, 20]
        assert not made.dispatcher.queue
    assert getattr(instance.scheduler, "evictions", 0) > 0
    first = [[each.outputs[0].at_s for each in answers] for answers in told]
    assert first[1][2] < first[0][2], "it begins sooner than where all must have room to end"


def test_requests_that_wait_at_instances_go_there_in_turn() -> None:
    pages = PlacePages(20, 10, 1)
    model = RankModel(EngineOptions(4, 8, 16), pages, FixedSeconds(0.5))
    made = SimulatedFleet(VirtualClock(), model, 2, routing="round_robin", at_once=True)
    told = play(made, [(0.0, 20, 20), (0.1, 4, 2), (0.2, 20, 20), (0.3, 4, 2)])
    assert [len(each.records) for each in made.dispatcher.instances.values()] == [0, 0]
    assert [each.given for each in made.dispatcher.instances.values()] == [2, 2]
    assert told[3].outputs[-1].at_s < told[0].outputs[-1].at_s < told[2].outputs[0].at_s
