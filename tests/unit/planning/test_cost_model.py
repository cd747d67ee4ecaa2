"""Placements, and the speed-up model: equations 1 to 4 by hand, and the same in seconds (CoCoServe, section 4.1)."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.errors import ConfigError
from elastic.planning.cost_model import CostModel, cost, speedup
from elastic.planning.measured_cost import Calibration, LinearLatency, MeasuredCostModel, WeightedCost, fit, split_rows
from elastic.planning.placement import LayerRun, PlaceCapacity, Placement, Places, ResourceDemand, difference
from elastic.types import Evict, Migrate, Replicate
from support.planning.homogeneous_speedup import HomogeneousSpeedup, alike, gamma
from support.planning.printed import HeterogeneousCost

AB = Placement((("a",), ("a", "b"), ("a", "b"), ("a",)))


class Transitions(CostModel):
    """Only delta: how often rows are split, joined or moved in a forward pass. (Equation 2)"""

    def work(self, places: Places) -> float:
        return 0.0

    def total(self, work: float, traffic: float, crossings: float) -> float:
        return crossings


def test_what_a_placement_says() -> None:
    assert tuple(map(len, AB.layers)) == (1, 2, 2, 1)
    assert AB.runs() == (LayerRun(range(1), ("a",)), LayerRun(range(1, 3), ("a", "b")), LayerRun(range(3, 4), ("a",)))
    assert AB.at("b") == (1, 2)
    assert AB.alone_at_home == Placement((("a",),) * 4)
    assert AB.after(Replicate((0, 1), "c")).layers[:2] == (("a", "c"), ("a", "b", "c"))
    assert AB.after(Evict((0, 1, 2, 3), "b")) == AB.alone_at_home
    assert AB.after(Evict((0, 1, 2, 3), "a")) == AB  # its own place stays
    assert AB.after(Migrate((1,), "b")).layers[1] == ("b",)
    assert AB.after(Replicate((0, 1), "a")) == AB.after(Replicate((1, 2), "b")) == AB


@pytest.mark.parametrize(
    ("layers", "transitions"),
    [
        ("a a a", 0),
        ("ab ab ab", 2),  # apart at the beginning, together at the end
        ("ab a ab", 4),
        ("ab ac a", 3),
        ("a b b", 1),
        ("", 0),
    ],
)
def test_transitions_are_counted_from_the_placement(layers: str, transitions: int) -> None:
    assert cost(Transitions(), Placement(tuple(map(tuple, layers.split())))) == transitions


@pytest.mark.parametrize("places", [(), ("a", "a")])
def test_a_layer_is_somewhere_and_nowhere_twice(places: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="layer 0"):
        Placement((places,))


def test_the_way_from_one_placement_to_another() -> None:
    after = Placement((("a", "c"), ("a", "c"), ("b",), ("b",)))
    assert difference(AB, after) == (Evict((1, 2), "b"), Migrate((2, 3), "b"), Replicate((0, 1), "c"))
    assert difference(AB, AB) == ()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(*[st.sets(st.sampled_from("abcd"), min_size=1).map(sorted)] * 2), min_size=1, max_size=5))
def test_the_way_leads_there(pairs: Any) -> None:
    before, after = (Placement(tuple(tuple(pair[i]) for pair in pairs)) for i in (0, 1))
    here = before
    for action in difference(before, after):
        assert isinstance(action, Evict | Migrate | Replicate)
        here = here.after(action)
    assert here == after


@pytest.mark.parametrize(
    ("free", "idle", "need", "most"),
    [
        (600, 1.0, ResourceDemand(100), 5),  # 100 of the 1000 stay free
        (600, 1.0, ResourceDemand(60, kv_bytes=40), 5),
        (600, 0.4, ResourceDemand(100, 0.4), 1),  # of 2.0 compute, 0.6 may be taken
        (100, 1.0, ResourceDemand(100), 0),
        (50, 0.0, ResourceDemand(10), 0),
    ],
)
def test_max_replicas(free: int, idle: float, need: ResourceDemand, most: int) -> None:
    place = PlaceCapacity("a", 1000, free, 2.0, idle)
    assert place.replicas(need) == most
    assert place.fits(need) == (most > 0)
    assert place.vacancy == min(free / 1000, idle)
    assert place.having(need, 2).having(need, -2).free_bytes == free


PLACES = {
    "a": PlaceCapacity("a", 100, 0, 4.0),
    "b": PlaceCapacity("b", 100, 0, 12.0),
    "c": PlaceCapacity("c", 100, 0, 4.0),
}
BANDWIDTHS = {"a": {"b": 2.0, "c": 5.0}}


def test_equations_1_to_3() -> None:
    model = HeterogeneousCost(10, rows=8, tokens=3, places=PLACES, bandwidths=BANDWIDTHS)
    assert model.work(("a",)) == pytest.approx(100 * 8 * 3 / 4)
    assert model.work(("a", "b")) == pytest.approx(100 * 2 * 3 / 4)  # rows 2 and 6, both end together
    assert model.traffic(("a", "b")) == pytest.approx(10 * 6 * 3 / 2)
    work, traffic = 600 + 150 + 150 + 600, 2 * (90 + 90)
    assert cost(model, AB) == pytest.approx(work + traffic)
    assert speedup(model, AB) == pytest.approx(2400 / (work + traffic))
    even = HeterogeneousCost(10, rows=8, tokens=3, places=PLACES, even=True, bandwidths=BANDWIDTHS)
    assert even.work(("a", "b")) == pytest.approx(100 * 4 * 3 / 4)  # the slower one decides
    assert even.traffic(("a", "b")) == pytest.approx(10 * 4 * 3 / 2)


@pytest.mark.parametrize(("degrees", "expected"), [((1, 1), 1.0), ((2, 2), 1 / 0.6), ((2, 1), 1 / 0.8)])
def test_equation_4(degrees: tuple[int, ...], expected: float) -> None:
    assert gamma(2, 10.0, 20, 5.0) == 0.2
    assert alike(0.2, degrees, 2) == pytest.approx(expected)
    placement = Placement(tuple(tuple("ab"[:p]) for p in degrees))
    assert 1 / cost(HomogeneousSpeedup(2, gamma=0.2), placement) == pytest.approx(expected)


def test_equation_4_with_a_constant_does_not_see_continuity() -> None:
    together, apart = (Placement(tuple(map(tuple, text.split()))) for text in ("ab ab a a", "ab a ab a"))
    fixed, follows = HomogeneousSpeedup(4, gamma=0.1), HomogeneousSpeedup(4, 0.05)
    assert cost(fixed, together) == cost(fixed, apart)
    assert cost(follows, together) < cost(follows, apart)


@pytest.mark.parametrize(
    ("points", "fixed", "each"),
    [
        ([(1, 3.0), (2, 5.0), (3, 7.0)], 1.0, 2.0),
        ([(1, 3.0)], 3.0, 0.0),
        ([(1, 5.0), (2, 4.0)], 4.5 / 1.025, 0.0),  # more takes no less
        ([(1, 1.0), (2, 3.0)], 0.0, 15 / 13),  # nothing takes no less than nothing
    ],
)
def test_lines_are_fitted_by_least_squares(points: list[tuple[float, float]], fixed: float, each: float) -> None:
    line = LinearLatency.fit(points)
    assert (line.fixed_s, line.each_s) == (pytest.approx(fixed), pytest.approx(each))


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"points=\[\]"):
        LinearLatency.fit([])
    with pytest.raises(ConfigError, match="above 0"):
        LinearLatency.fit([(1, 0.0)])
    with pytest.raises(ConfigError, match="'z' was not measured"):
        MeasuredCostModel(Calibration({"a": LinearLatency(1, 1)}), 1, 1, 1).work(("a", "z"))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 12), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=3))
def test_rows_are_split_as_well_as_can_be(rows: int, speeds: list[tuple[int, int]]) -> None:
    lines = [LinearLatency(*map(float, speed)) for speed in speeds]

    def end(split: tuple[int, ...]) -> float:
        return max((line(n) for line, n in zip(lines, split, strict=True) if n), default=0.0)

    found = split_rows(rows, lines)
    splits = (s for s in itertools.product(range(rows + 1), repeat=len(lines)) if sum(s) == rows)
    assert sum(found) == rows
    assert min(found) >= 0
    assert end(found) == pytest.approx(min(map(end, splits)))


def test_seconds_by_hand() -> None:
    layers = {"a#1": LinearLatency(1.0, 0.5), "a#2": LinearLatency(1.0, 0.5), "b": LinearLatency(1.0, 0.5)}
    links = {("a#1", "a#2"): LinearLatency(0.25, 0.0), ("a#1", "b"): LinearLatency(0.5, 0.001)}
    beside = {"a": [LinearLatency(1.5, 0.75)]}
    model = MeasuredCostModel(Calibration(layers, links, beside), rows=8, tokens=1, token_bytes=10)
    assert model.work(("a#1",)) == 5.0
    assert model.split(("a#1", "b")).rows == (4, 4)
    assert model.work(("a#1", "b")) == 3.0
    assert model.work(("a#1", "a#2")) == 4.5  # side by side on one device
    assert model.crossing(("a#1",), ("a#1",)) == 0.0
    assert model.crossing(("a#1",), ("a#1", "b")) == pytest.approx(0.54)
    assert model.crossing(("a#1",), ("a#2",)) == 0.0  # one memory
    assert model.crossing(("a#1",), ("b",)) == pytest.approx(0.58)
    both = Placement((("a#1", "b"),) * 3)
    assert cost(model, both) == pytest.approx(9 + 2 * 0.54)
    assert speedup(model, both) == pytest.approx(15 / (9 + 2 * 0.54))
    assert cost(WeightedCost(((2.0, model), (1.0, model))), both) == pytest.approx(3 * cost(model, both))


@settings(deadline=None, max_examples=60)
@given(st.floats(0.1, 10), st.floats(0.0, 10), st.integers(-2, 2))
def test_a_line_is_found_again_at_any_scale(fixed: float, each: float, scale: int) -> None:
    points = [(n, 10.0**scale * (fixed + each * n)) for n in (1, 4, 16)]
    line = LinearLatency.fit(points)
    assert [line(n) for n, _ in points] == pytest.approx([seconds for _, seconds in points])


def on_one_device(rows: int, beside: list[LinearLatency]) -> MeasuredCostModel:
    """A row takes a second at any of the places of "a"."""
    layers = {f"a#{i}": LinearLatency(0.0, 1.0) for i in range(4)}
    return MeasuredCostModel(Calibration(layers, {}, {"a": beside}), rows, 1, 1)


def test_places_share_the_cores_of_their_device() -> None:
    """Two cores: two places do not slow each other; three or four do, as far as they still compute."""
    model = on_one_device(6, [LinearLatency(0.0, 1.0), LinearLatency(0.0, 1.5)])
    assert [model.work(tuple(f"a#{i}" for i in range(n))) for n in (1, 2, 3)] == [6.0, 3.0, 3.0]
    assert model.work(("a#0", "a#1", "a#2", "a#3")) == pytest.approx(3.0)  # rows 2, 2, 1, 1: at half speed, 2 s; 1 s
    assert on_one_device(8, []).work(("a#0", "a#1")) == 4.0  # not measured


def test_handing_inputs_to_another_device_takes_its_time() -> None:
    def of(rows: int) -> MeasuredCostModel:
        calibration = Calibration(dict.fromkeys(("a#0", "a#1", "b"), LinearLatency(0.0, 1.0)), handing_s=0.25)
        return MeasuredCostModel(calibration, rows, 1, 1)

    assert of(6).work(("a#0",)) == 6.0
    assert of(6).work(("a#0", "a#1", "b")) == 2.25  # beside on one device it was measured with that
    assert of(1).work(("a#0", "b")) == 1.0  # no row for it


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.lists(st.floats(1.0, 2.0), min_size=3, max_size=3),
)
def test_places_side_by_side_take_no_less_than_alone_and_no_more_than_always_slowed(
    rows: list[int], slower: list[float]
) -> None:
    """However uneven their rows are."""
    slower = sorted(slower)
    model = on_one_device(sum(rows), [LinearLatency(0.0, times) for times in slower])
    took = model._side_by_side([(f"a#{i}", n) for i, n in enumerate(rows)])
    assert max(rows) <= took * (1 + 1e-9)
    assert took <= max(1.0, *slower) * max(rows) * (1 + 1e-9)


def test_every_place_has_a_row_where_there_are_enough() -> None:
    """As share_out of the runtime has it, also where a place alone would be sooner."""
    slow = Calibration({"a": LinearLatency(1.0, 1.0), "b": LinearLatency(50.0, 1.0), "c": LinearLatency(1.0, 1.0)})
    assert MeasuredCostModel(slow, 5, 1, 1).split(("a", "b", "c")).rows == (2, 1, 2)
    assert MeasuredCostModel(slow, 2, 1, 1).split(("a", "b", "c")).rows == (1, 0, 1)


def test_one_row_is_computed_where_it_is_soonest() -> None:
    model = MeasuredCostModel(fit({"a": [(1, 5.0)], "b": [(1, 1.0)]}), rows=1, tokens=1, token_bytes=1)
    assert model.split(("a", "b")).rows == (0, 1)
    assert math.isclose(model.work(("a", "b")), 1.0)
