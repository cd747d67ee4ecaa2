"""Small clusters drawn at random, to try planners on."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from elastic.planning.cost_model import CostModel
from elastic.planning.measured_cost import Calibration, LinearLatency, MeasuredCostModel
from elastic.planning.placement import PlaceCapacity, Placement, ResourceDemand
from support.planning.printed import HeterogeneousCost

NAMES = "abc"


@dataclass(frozen=True)
class Case:
    placement: Placement
    needs: list[ResourceDemand]
    places: list[PlaceCapacity]
    model: CostModel


def random_case(seed: int, *, printed: bool, layers: int = 6) -> Case:
    """At most so many layers at three places; the printed model, or one in seconds."""
    choose = random.Random(f"{seed} {printed}")
    count = choose.randint(1, layers)
    speeds = {a: {b: 10 ** choose.uniform(-1, 1.5) for b in NAMES if b != a} for a in NAMES}
    places = [
        PlaceCapacity(name, 1000, choose.randint(0, 800), choose.choice([0.25, 0.5, 1, 2]), 1.0) for name in NAMES
    ]
    needs = [ResourceDemand(choose.choice([60, 100, 150]), choose.choice([0.0, 0.05])) for _ in range(count)]
    homes = tuple((choose.choice("ab"),) for _ in range(count))
    placement = Placement((("a",),) * count) if choose.random() < 0.7 else Placement(homes)
    return Case(placement, needs, places, _printed(choose, places, speeds) if printed else _in_seconds(choose))


def _printed(
    choose: random.Random, places: list[PlaceCapacity], speeds: Mapping[str, Mapping[str, float]]
) -> CostModel:
    by_name = {place.name: place for place in places}
    return HeterogeneousCost(choose.choice([4, 16, 64]), 8, 4, by_name, bandwidths=speeds)


def _in_seconds(choose: random.Random) -> CostModel:
    layers = {name: LinearLatency(choose.uniform(0, 3), choose.uniform(0.1, 2)) for name in NAMES}
    pairs = [(a, b) for a in NAMES for b in NAMES if a < b]
    links = {pair: LinearLatency(choose.choice([0.1, 0.5, 1, 3]), choose.choice([0, 0.01, 0.1])) for pair in pairs}
    return MeasuredCostModel(Calibration(layers, links), choose.randint(1, 12), 1, 1)
