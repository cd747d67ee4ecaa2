"""The parts of simulated time: the clock, quantiles, pages, requests, seconds."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import CapacityError, ConfigError, Overloaded, StateError
from elastic.planning.estimate.performance import InstanceCost
from elastic.planning.estimate.roofline import Roofline, Work
from elastic.planning.measured_cost import LinearLatency
from elastic.planning.pipeline.chunk_cost import Chunk, ChunkCost
from elastic.sim.core.clock import VirtualClock, random_stream
from elastic.sim.core.pages import SimulatedMemory
from elastic.sim.core.step_seconds import ALIKE, MeasuredPace, MeasuredStep, Noise
from elastic.sim.core.stretch import Stretch
from elastic.sim.quantiles import ACCURACY, QuantileSketch
from elastic.sim.roofline import DividedSteps, SheetSteps
from elastic.sim.workload import Bursts, Rates, RequestArrival, request_of


def test_events_happen_in_order_of_time_then_of_when_they_were_made() -> None:
    clock, seen = VirtualClock(), []
    for name, at_s in (("b", 2.0), ("a", 1.0), ("c", 2.0)):
        clock.at(at_s, lambda name=name: seen.append((name, clock.now)))  # type: ignore[misc]
    clock.at(1.5, lambda: seen.append(("never", clock.now))).cancel()
    clock.run(1.2)
    assert seen == [("a", 1.0)]
    assert clock() == 1.2
    clock.run()
    assert seen[1:] == [("b", 2.0), ("c", 2.0)]
    assert clock.events == 3
    with pytest.raises(StateError):
        clock.at(1.0, lambda: None)


@given(st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=60), st.floats(0, 1))
def test_quantiles_are_those_of_the_values_but_for_their_accuracy(values: list[float], share: float) -> None:
    sketch = QuantileSketch()
    for value in values:
        sketch.add(value)
    exact = sorted(values)[math.floor(share * (len(values) - 1))]
    assert sketch.read(share)[0] == pytest.approx(exact, rel=2.1 * ACCURACY)
    assert sketch.mean == pytest.approx(statistics.fmean(values))


def test_quantiles_of_nothing_and_of_zeros_are_zero() -> None:
    sketch = QuantileSketch()
    assert set(sketch.described().values()) == {0.0}
    sketch.add(0.0)
    assert sketch.read(0.5) == [0.0]


def test_noise_has_the_mean_of_what_it_is_multiplied_with() -> None:
    noise = Noise(0.3, random_stream(0, "noise"))
    assert statistics.fmean(noise() for _ in range(20_000)) == pytest.approx(1, abs=0.02)
    assert Noise(0.0, random.Random())() == 1.0


def test_measured_noise_is_that_of_steps_of_such_seconds() -> None:
    short = [MeasuredStep(1e-3 * (1 + i / ALIKE), 2.0 + i % 2) for i in range(ALIKE)]
    long = [MeasuredStep(1.0 + i / ALIKE, 1.0) for i in range(ALIKE + 7)]
    noise = Noise([*long, *short], random_stream(0, "noise"))
    drawn = [noise(1.5e-3) for _ in range(300)]
    assert set(drawn) == {2.0, 3.0}
    assert sum(a == b for a, b in itertools.pairwise(drawn)) < 20, "each follows the one that it followed"
    assert noise(0.0, steps=10_000) == pytest.approx(2.5, rel=0.02)
    assert {noise(seconds) for seconds in (1.0, 9.0)} == {1.0}


@pytest.mark.parametrize(
    ("at_s", "cost_s", "seconds"),
    [(0.0, 1.0, 1.0), (0.5, 1.0, 1.5), (0.0, 2.0, 3.0), (3.0, 0.75, 1.0), (3.5, 0.75, 0.5 + 0.375), (9.0, 3.0, 4.0)],
)
def test_a_pace_gets_done_what_the_real_rank_did_at_each_moment(at_s: float, cost_s: float, seconds: float) -> None:
    pace = MeasuredPace([(0.0, 1.0, 1.0), (1.0, 3.0, 1.0), (4.0, 5.0, 1.0)])  # 3 s of cost in 4 s: the mean between
    assert pace.seconds(at_s, cost_s) == pytest.approx(seconds)


@given(st.integers(2, 200), st.floats(1e-3, 1.0), st.floats(0, 1e-2), st.floats(0, 0.999))
def test_a_stretch_that_is_cut_keeps_the_steps_that_have_begun(
    steps: int, first_s: float, more_s: float, share: float
) -> None:
    whole = Stretch(5.0, steps, first_s, more_s)
    now = whole.begin_s + share * (whole.end_s - whole.begin_s)
    cut = whole.until(now)
    assert 1 <= cut.steps <= steps
    assert cut.end_s >= now - 1e-6
    assert cut.steps == 1 or cut._replace(steps=cut.steps - 1).end_s <= now + 1e-6


def memory(sectors: int = 10) -> SimulatedMemory:
    return SimulatedMemory(2 * sectors + 7, 7, 2, 4)


def test_pages_of_weights_and_sectors_are_those_of_the_budget() -> None:
    pages = memory()
    taken = [pages.allocate(0) for _ in range(10)]
    assert len(set(taken)) == 10
    with pytest.raises(CapacityError):
        pages.allocate(0)
    with pytest.raises(CapacityError):
        pages.resize(other_pages=8)
    assert pages.other_pages == 7
    pages.resize(other_pages=1)
    assert pages.sectors == 13
    pages.free(0, taken[0])
    pages.resize(sector_pages=1)
    assert (pages.sectors, pages.room(growing=True), pages.free_pages) == (26, 17, 17)
    pages.check()


def test_a_lower_cap_binds_new_requests_first() -> None:
    pages = memory()
    for _ in range(6):
        pages.allocate(0)
    pages.set_cap(4)
    assert (pages.room(growing=False), pages.room(growing=True), pages.reached_cap()) == (0, 4, False)
    for sector in range(2):
        pages.free(0, sector)
    assert pages.reached_cap()
    with pytest.raises(Overloaded):
        pages.require_possible(5, "a request")
    with pytest.raises(CapacityError):
        pages.require_possible(11, "a request")


def test_no_two_prompts_are_alike_behind_what_they_share() -> None:
    job = RequestArrival(0.0, 40, 5, 9, 10, "chat")
    first, second = request_of(job, 1), request_of(job, 257)
    assert first.prompt[:10] == second.prompt[:10]
    assert first.prompt != second.prompt
    assert (len(first.prompt), first.max_tokens) == (40, 9)
    assert len(request_of(job._replace(prompt=2, shared=0), 3).prompt) == 2


def test_rates_go_in_lines_and_bursts_are_within_their_windows() -> None:
    rates = Rates((1.0, 3.0), 10.0)
    assert [rates.rate(at_s) for at_s in (0, 5, 10, 15, 20)] == [1, 2, 3, 2, 1]
    times = list(Bursts(1.0, ((10.0, 20.0, 50.0),)).times(random.Random(0), 40.0))
    assert 400 < sum(10 <= at_s < 20 for at_s in times) < 600
    assert 15 < sum(not 10 <= at_s < 20 for at_s in times) < 50
    assert max(times) < 40
    with pytest.raises(ConfigError):
        Bursts(1.0, ((10.0, 5.0, 2.0),))
    with pytest.raises(ConfigError):
        Rates((0.0,), 1.0)


@pytest.mark.parametrize("chunks", [[(0, 7)], [(100, 1), (30, 1), (5, 60)]])
def test_steps_by_a_data_sheet_take_what_the_estimate_says(chunks: list[tuple[int, int]]) -> None:
    layer = Roofline((Work(1e9, 2e9), Work(4e8, 8e8, least_met=0.25), Work(pair_flops=3e6, kv_bytes=2e4)), 1e14, 1e12)
    rest = Roofline((Work(2e8, chunk_flops=4e8),), 1e14, 1e12)
    cost = InstanceCost((((layer, 12), (rest, 1)),), (24,), LinearLatency(1e-5, 1e-10), token_bytes=4096)
    batch = [Chunk("", start, tokens) for start, tokens in chunks]
    assert SheetSteps.of(cost).batch(batch) == pytest.approx(cost.pass_s(batch))


def test_ranks_divide_what_each_takes_less() -> None:
    alone, shared = (Roofline((Work(1e9), Work(nbytes)), 1e14, 1e12) for nbytes in (4e9, 2e9))
    link = LinearLatency(1e-5, 1e-10)
    divided = DividedSteps.of(
        InstanceCost((((alone, 3),),)), InstanceCost((((shared, 3),),), (6,), link, token_bytes=64), 2
    )
    assert divided.batch([Chunk("", 5, 1)]) == pytest.approx(3 * 4e9 / 1e12)


def test_what_no_data_sheet_says_is_not_simulated_by_one() -> None:
    windowed = Roofline((Work(kv_bytes=1.0, window=9),), 1.0, 1.0)
    for stage in (((windowed, 1),), ((ChunkCost(0, 0, 1, 1, 0), 1),)):
        with pytest.raises(ConfigError):
            SheetSteps.of(InstanceCost((stage,)))
