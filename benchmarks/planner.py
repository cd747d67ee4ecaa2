"""The time that planners of replicas take, and their distance from the best placement there is.

    python benchmarks/planner.py

80 layers over 64 places, by the printed model and by the one in seconds: algorithm 1, and the search that begins where
it ends. Then random cases of at most 6 layers over 3 places, beside every placement there is: the share within 1 %, and
quantiles of what is lost. Targets: 50 ms; within 1 %.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import arguments, finish, table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from elastic.planning.cost_model import cost, speedup
from elastic.planning.local_search import plan_up
from elastic.planning.measured_cost import Calibration, LinearLatency, MeasuredCostModel
from elastic.planning.placement import PlaceCapacity, Placement, ResourceDemand
from support.planning.brute_force import best
from support.planning.printed import HeterogeneousCost, scale_up
from support.planning.random_placements import Case, random_case

LAYERS, PLACES = 80, 64
PLANNERS: dict[str, Callable[..., Placement]] = {"algorithm 1": scale_up, "search": plan_up}


def large_case(seed: int, *, printed: bool) -> Case:
    """Places with room for up to 27 layers, in part busy; some are twice as fast."""
    choose = random.Random(seed)
    names = [f"cuda:{i}" for i in range(PLACES)]
    places = [
        PlaceCapacity(
            name,
            80_000,
            choose.randint(0, 40_000),
            choose.choice([1.0, 2.0]),
            choose.uniform(0.3, 1),
        )
        for name in names
    ]
    layers = {name: LinearLatency(1e-4 * choose.uniform(1, 2), 1e-5 * choose.uniform(1, 2)) for name in names}
    links = {(a, b): LinearLatency(2e-5, 1e-11) for a in names for b in names if a < b}
    in_seconds = MeasuredCostModel(Calibration(layers, links), 64, 1, 16384)
    speeds = {name: {other: 100.0 for other in names if other != name} for name in names}
    by_name = {place.name: place for place in places}
    model = HeterogeneousCost(512, 64, 512, by_name, bandwidths=speeds) if printed else in_seconds
    return Case(Placement(((names[0],),) * LAYERS), [ResourceDemand(1200, 0.001)] * LAYERS, places, model)


def times(rounds: int) -> list[dict[str, Any]]:
    """Milliseconds of one plan; every round has a fresh cost model, that knows no price yet."""
    rows = []
    for printed in (True, False):
        for name, plan in PLANNERS.items():
            took, gains = [], []
            for seed in range(rounds):
                case = large_case(seed, printed=printed)
                start = time.perf_counter()
                placement = plan(case.placement, case.needs, case.places, case.model)
                took.append(1e3 * (time.perf_counter() - start))
                gains.append(speedup(case.model, placement))
            model = "printed" if printed else "seconds"
            ms = {"p50": statistics.median(took), "max": max(took)}
            rows.append({"model": model, "planner": name, "ms": ms, "speedup": statistics.median(gains)})
    return rows


def distances(cases: int) -> list[dict[str, Any]]:
    """Compare the cost of the planners' placements with that of the best ones."""
    rows = []
    for printed in (True, False):
        lost: dict[str, list[float]] = {name: [] for name in PLANNERS}
        for seed in range(cases):
            case = random_case(seed, printed=printed)
            args = case.placement, case.needs, case.places, case.model
            least = cost(case.model, best(*args))
            for name, plan in PLANNERS.items():
                lost[name].append(cost(case.model, plan(*args, t_up=-1.0)) / least - 1)
        for name, values in lost.items():
            ordered = sorted(values)
            quantiles = {f"p{q}": ordered[min(len(ordered) - 1, q * len(ordered) // 100)] for q in (50, 90, 99)}
            within = sum(value <= 0.01 for value in values) / len(values)
            model = "printed" if printed else "seconds"
            rows.append(
                {"model": model, "planner": name, "within": within, **quantiles, "max": ordered[-1], "cases": cases}
            )
    return rows


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    took = times(3 if options.quick else 2 * options.rounds)
    far = distances(50 if options.quick else 2000)
    print(f"one plan, {LAYERS} layers over {PLACES} places")
    rows = [
        [t["model"], t["planner"], f"{t['ms']['p50']:.1f}", f"{t['ms']['max']:.1f}", f"{t['speedup']:.2f}"]
        for t in took
    ]
    table(["model", "planner", "ms, median", "ms, most", "speed-up"], rows)
    print(f"\nbeside every placement there is, {far[0]['cases']} cases of at most 6 layers over 3 places")
    columns = ("p50", "p90", "p99", "max")
    rows = [[f["model"], f["planner"], f"{f['within']:.1%}", *(f"{f[c]:.2%}" for c in columns)] for f in far]
    table(["model", "planner", "within 1 %", *(f"lost, {c}" for c in columns)], rows)
    finish("planner", options.device, {"times": took, "distances": far})


if __name__ == "__main__":
    main()
