"""Fleets in simulated time: the real scheduler and dispatcher, driven by events."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from elastic.engines.base import Output, Request
from elastic.planning.pipeline.chunk_cost import ChunkCost
from elastic.sim.core.clock import VirtualClock
from elastic.sim.core.executor import STOP
from elastic.sim.core.fleet import RankModel, SimulatedFleet
from elastic.sim.core.instance import EngineOptions, PlacePages
from elastic.sim.core.step_seconds import FixedSeconds, StepCost

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


def fleet(cost: StepCost, instances: int = 1, *, blocks: int = 100, stretch_s: float = 0.0) -> SimulatedFleet:
    model = RankModel(EngineOptions(4, 8, 16), PlacePages(blocks + 10, 10, 1), cost, stretch_s=stretch_s)
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


def test_requests_wait_until_blocks_come_free() -> None:
    first, second = play(fleet(FixedSeconds(0.5), blocks=10), [(0.0, 20, 20), (0.1, 20, 20)])
    assert second.outputs[0].at_s > first.outputs[-1].at_s
    assert second.tokens == 20


def test_two_instances_serve_side_by_side() -> None:
    first, second = play(fleet(FixedSeconds(0.5), 2, blocks=10), [(0.0, 20, 20), (0.1, 20, 20)])
    assert second.outputs[-1].at_s == pytest.approx(first.outputs[-1].at_s + 0.1)


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
