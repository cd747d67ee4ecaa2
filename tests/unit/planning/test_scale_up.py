"""Planners of replicas: algorithm 1, and the search by runs (CoCoServe, section 4.1)."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.planning.cost_model import cost, speedup
from elastic.planning.incremental_cost import IncrementalCost, RangeCosts
from elastic.planning.local_search import PlannedModel, plan_together, plan_up
from elastic.planning.placement import PlaceCapacity, Placement, ResourceDemand
from elastic.planning.scale_up import candidates
from elastic.types import Evict, Replicate
from support.planning.brute_force import best
from support.planning.homogeneous_speedup import HomogeneousSpeedup
from support.planning.printed import HeterogeneousCost, scale_up
from support.planning.random_placements import Case, random_case

seeds = st.integers(0, 10_000)


def place(name: str, free: int, **fields: Any) -> PlaceCapacity:
    return PlaceCapacity(name, 1000, free, **{"margin": 0.0, **fields})


def of(text: str) -> Placement:
    return Placement(tuple(map(tuple, text.split())))


@pytest.mark.parametrize(
    ("layers", "free", "expected"),
    [
        ("a a a a", 400, [0, 1, 2, 3]),
        ("a a a a", 200, [0, 1]),
        ("a ab a a a", 1000, [2, 3, 4, 0]),  # the longest run first
        ("a ab a ab a", 1000, [0, 2, 4]),  # ties by index
        ("ab ab ab", 1000, []),
        ("a a a", 99, []),
    ],
)
def test_candidates_by_continuity(layers: str, free: int, expected: list[int]) -> None:
    placement = of(layers)
    assert candidates(placement.layers, [ResourceDemand(100)] * len(placement.layers), place("b", free)) == expected


@pytest.mark.parametrize("plan", [plan_up, scale_up])
def test_places_that_are_vacant_in_memory_and_compute_are_filled(plan: Any) -> None:
    places = [place("b", 200), place("c", 900, idle=0.2), place("d", 300), place("e", 900, idle=0.3)]
    placement, model = Placement((("a",),) * 4), HomogeneousSpeedup(4, gamma=0.01)
    for t_up, filled in ((0.2, "de"), (0.3, ""), (0.19, "bcde")):
        after = plan(placement, [ResourceDemand(100)] * 4, places, model, t_up=t_up)
        assert "".join(name for name in "bcde" if after.at(name)) == filled


def test_algorithm_1_takes_what_raises_s() -> None:
    placement, needs = Placement((("a",),) * 4), [ResourceDemand(100)] * 4
    cheap, dear = HomogeneousSpeedup(4, per_transition=0.05), HomogeneousSpeedup(4, per_transition=0.9)
    assert scale_up(placement, needs, [place("b", 300)], cheap) == of("ab ab ab a")
    assert scale_up(placement, needs, [place("b", 300)], dear) == placement
    assert scale_up(placement, needs, [place("b", 200)], cheap, t_up=0.2) == placement  # not vacant enough
    assert scale_up(placement, needs, [place("b", 300), place("c", 250)], HomogeneousSpeedup(4, gamma=0.1)) == of(
        "abc abc ab a"
    )


def test_the_search_finds_runs_that_pay_only_together() -> None:
    """One layer at a third place makes three transitions of two; all layers do not."""
    places, links = [place(n, 900) for n in "abc"], {n: {m: 1.0 for m in "abc" if m != n} for n in "abc"}
    model = HeterogeneousCost(8, 8, 4, {p.name: p for p in places}, bandwidths=links)
    placement, needs = Placement((("a",),) * 4), [ResourceDemand(100)] * 4
    printed, searched = (plan(placement, needs, places, model) for plan in (scale_up, plan_up))
    assert speedup(model, printed) < 0.9 * speedup(model, searched)
    assert searched == of("abc abc abc abc") == best(placement, needs, places, model)


def test_few_layers_on_many_places_are_planned_at_once() -> None:
    """As many orders of twelve places as there are would take days."""
    places = [place(f"p{number}", 900) for number in range(12)]
    placement, needs = Placement((("p0",),) * 4), [ResourceDemand(100)] * 4
    planned = plan_up(placement, needs, places, HomogeneousSpeedup(4, gamma=0.01))
    assert speedup(HomogeneousSpeedup(4, gamma=0.01), planned) > 1


def filled(case: Case, after: Placement) -> None:
    """No place has more than its margin allows, and nothing that was there is gone."""
    for one in case.places:
        new = [layer for layer in after.at(one.name) if one.name not in case.placement.layers[layer]]
        if new:
            assert sum(case.needs[layer].total_bytes for layer in new) <= one.room_bytes
            assert sum(case.needs[layer].compute for layer in new) <= one.room_compute + 1e-9
    for before, now in zip(case.placement.layers, after.layers, strict=True):
        assert before[0] == now[0]
        assert set(before) <= set(now)


@settings(deadline=None, max_examples=60)
@given(seeds, st.booleans())
@pytest.mark.slow
def test_planners_leave_margins_alone_and_never_make_it_slower(seed: int, printed: bool) -> None:
    case = random_case(seed, printed=printed, layers=12)
    args = case.placement, case.needs, case.places, case.model
    first, second = scale_up(*args), plan_up(*args)
    filled(case, first)
    filled(case, second)
    assert cost(case.model, second) <= cost(case.model, first) * (1 + 1e-9)
    assert cost(case.model, first) <= cost(case.model, case.placement) * (1 + 1e-9)
    assert (scale_up(*args), plan_up(*args)) == (first, second)  # the same again


@settings(deadline=None, max_examples=60)
@given(seeds, st.booleans(), st.booleans())
def test_changes_cost_what_the_placement_after_them_does(seed: int, printed: bool, adds: bool) -> None:
    """Any range of any random placement, and the sums that are kept when it is done."""
    case, choose = random_case(seed, printed=printed, layers=9), random.Random(seed)
    here = case.placement
    for name in "abc":
        here = here.after(Replicate(tuple(i for i in range(len(here.layers)) if choose.random() < 0.4), name))
    name, model = choose.choice("abc"), case.model
    tally = IncrementalCost(model, here)
    ranges = list(itertools.combinations(range(len(here.layers) + 1), 2))
    for change in RangeCosts(tally, name, adds).changes(ranges):
        layers = tuple(range(change.first, change.last))
        after = here.after(Replicate(layers, name) if adds else Evict(layers, name))
        assert change.cost == pytest.approx(cost(model, after), rel=1e-9)
        done = tally.copy()
        done.apply(change)
        assert (done.placement, done.cost) == (after, pytest.approx(cost(model, after), rel=1e-9))
    assert tally.placement == here


@settings(deadline=None, max_examples=15)
@given(seeds, st.booleans())
def test_many_layers_are_planned_within_margins_too(seed: int, printed: bool) -> None:
    """So many that not every range is looked at; some replicas are there before."""
    case = random_case(seed, printed=printed, layers=6)
    many = Placement(case.placement.layers * 12)
    many = many.after(Replicate(tuple(range(seed % 5, min(20, len(many.layers)))), "c"))
    long = replace(case, placement=many, needs=[replace(n, nbytes=n.nbytes // 8) for n in case.needs * 12])
    args = long.placement, long.needs, long.places, long.model
    after = plan_up(*args)
    filled(long, after)
    assert cost(long.model, after) <= cost(long.model, scale_up(*args)) * (1 + 1e-9)


@settings(deadline=None, max_examples=60)
@given(seeds, st.booleans())
def test_every_replica_that_algorithm_1_keeps_raised_s(seed: int, printed: bool) -> None:
    """By a plain reading of the algorithm, that prices every placement anew."""
    case = random_case(seed, printed=printed)
    here = case.placement
    for one in [place for place in case.places if place.vacancy > 0.2]:
        for layer in candidates(here.layers, case.needs, one):
            tried = here.after(Replicate((layer,), one.name))
            if cost(case.model, tried) < cost(case.model, here) * (1 - 1e-9):
                here = tried
    assert scale_up(case.placement, case.needs, case.places, case.model) == here


@pytest.mark.parametrize("printed", [True, False])
def test_the_search_is_within_one_percent_of_every_placement_there_is(printed: bool) -> None:
    """benchmarks/planner.py has the distribution over more cases."""
    far = 0
    for seed in range(60):
        case = random_case(seed, printed=printed, layers=5)
        args = case.placement, case.needs, case.places, case.model
        least = cost(case.model, best(*args))
        found = cost(case.model, plan_up(*args, t_up=-1.0))
        assert found >= least * (1 - 1e-9)
        far += found > 1.01 * least
    assert far <= 2


def test_two_models_lend_each_other_places() -> None:
    """Each has a place of its own with room for half of the other, and a third is shared in halves."""
    free = {"a": 200, "b": 200, "c": 400}
    places = [place(name, nbytes) for name, nbytes in free.items()]
    links = {n: {m: 100.0 for m in "abc" if m != n} for n in "abc"}
    model = HeterogeneousCost(64, 8, 4, {p.name: p for p in places}, bandwidths=links)
    needs = (ResourceDemand(100),) * 4
    instances = {
        "first": PlannedModel(Placement((("a",),) * 4), needs, model),
        "second": PlannedModel(Placement((("b",),) * 4), needs, model),
    }
    found = plan_together(instances, places, t_up=0.0)
    assert found["first"].at("b") == (0, 1)
    assert found["second"].at("a") == (0, 1)
    assert len(found["first"].at("c")) == len(found["second"].at("c")) == 2
    for name, here in free.items():
        new = sum(len(p.at(name)) for p in found.values()) - (4 if name in "ab" else 0)
        assert 100 * new <= here
    assert all(speedup(model, p) > 1.2 for p in found.values())
