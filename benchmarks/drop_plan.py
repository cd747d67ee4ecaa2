"""The time that plans of drops take, and how far their stages and groups are from the best there are (KunServe, 4.1).

    python benchmarks/drop_plan.py

Instances of 32 layers, all of which are short: plans that free a layer, half a model, a third and half of all models,
by figure 6 ("paper") and by layers with groups as small as can be ("partial"). Every plan says the stages of each
group, so that is counted. With "unlike", each instance has keys and values of its own, so that no two groups are alike.
Then cuts of random ranks beside every cut there is. Targets: 1 ms for 10 instances, 50 ms for 1,000; all cuts the best.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from common import arguments, finish, table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from elastic.planning.arrangement.drop import PlannedGroup, drop_plan
from elastic.planning.arrangement.stages import Held, stages
from support.planning.every_cut import best_score, random_ranks

LAYERS, LAYER_BYTES = 32, 400 << 20
MOST = 4


def fleet(count: int, choose: random.Random, *, unlike: bool) -> list[PlannedGroup]:
    """Whole instances, one a group."""
    groups = []
    for number in range(count):
        kv = tuple([choose.randint(0, LAYER_BYTES)] * LAYERS) if unlike else ()
        groups.append((Held(f"i{number}", frozenset(range(LAYERS)), None, kv),))
    return groups


def needs(count: int) -> dict[str, int]:
    """By name, bytes to free."""
    model = LAYERS * LAYER_BYTES
    return {
        "a layer": LAYER_BYTES,
        "half a model": model // 2,
        "a third of all": count * model // 3,
        "half of all": count * model // 2,
    }


def times(counts: list[int], rounds: int) -> list[dict[str, Any]]:
    """Milliseconds of one plan."""
    rows = []
    sizes = [LAYER_BYTES] * LAYERS
    for count in counts:
        for name, needed in needs(count).items():
            for planner, unlike in (("paper", False), ("partial", False), ("partial, unlike", True)):
                groups = fleet(count, random.Random(0), unlike=unlike)
                took = []
                for _ in range(rounds):
                    start = time.perf_counter()
                    plan = drop_plan(groups, sizes, needed, whole=planner == "paper", most=MOST)
                    took.append(1e3 * (time.perf_counter() - start))
                assert plan is not None
                ms = {"p50": statistics.median(took), "max": max(took)}
                stages = max((len(group.members) for group in plan.groups), default=0)
                rows.append({"instances": count, "need": name, "planner": planner, "ms": ms, "stages": stages})
    return rows


def distances(cases: int) -> dict[str, int]:
    """Count the cuts that are as good as the best of all cuts in all orders of ranks."""
    choose = random.Random(0)
    found = {"cases": 0, "best": 0, "without a cut": 0}
    for _ in range(cases):
        cost = [choose.randint(1, 9) for _ in range(choose.randint(2, 7))]
        ranks, nbytes = random_ranks(choose, len(cost)), [2 * one for one in cost]
        best = best_score(ranks, cost, nbytes, 2.0, 5.0)
        cut = stages(ranks, cost, nbytes, first=2.0, last=5.0)
        found["cases"] += 1
        found["without a cut"] += best is None
        found["best"] += best == (cut and (cut.fetched_bytes, cut.bottleneck, cut.moved_bytes))
    return found


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    took = times([10, 100] if options.quick else [10, 30, 100, 300, 1000], 3 if options.quick else options.rounds)
    far = distances(100 if options.quick else 5000)
    rows = [
        [t["instances"], t["need"], t["planner"], f"{t['ms']['p50']:.2f}", f"{t['ms']['max']:.2f}", t["stages"]]
        for t in took
    ]
    table(["instances", "need", "planner", "ms, median", "ms, most", "stages"], rows)
    print(f"\n{far['best']} of {far['cases']} cuts are the best there are; for {far['without a cut']} there is none")
    finish("drop_plan", options.device, {"times": took, "stages": far})


if __name__ == "__main__":
    main()
