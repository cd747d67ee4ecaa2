"""The row `schedulers` of `reshard.py`: the policy of lengths on a simulated fleet of eight ranks, against others.

Arrivals are those of the paper (AMOEBA, section 4.2.4): 60 prompts of 1K a minute and one of 50K, at random times. It
does not say how long answers are, and that decides whether instances keep up. So several loads are told: answers of
short requests of 320 to 768 tokens on average. Seeds were drawn after the policy was done, and were used for nothing
else. Requests, speeds and capacities are those of its table 1; what a token of a prompt costs is an estimate
(`tests/support/planning/simulated_degrees.py`).
"""

from __future__ import annotations

import random
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from common import Kept, ratio
from reshard_setting import Setting

from support.planning.simulated_degrees import (
    Lengthwise,
    Offered,
    SimulatedDegrees,
    least_load_first,
    round_robin,
)

SEED = 4000
MINUTES = 20
ANSWERS = ((128, 512), (256, 768), (384, 896), (512, 1024))
"""Tokens of a short request's answer, the least and the most."""
SCHEDULERS = {"lengths": Lengthwise, "round robin": round_robin, "least load first": least_load_first}


def arrivals(seed: int, answers: tuple[int, int], minutes: float) -> list[Offered]:
    choose, found = random.Random(seed), []
    for kind, rate, prompt in (("short", 60.0, 1024), ("long", 1.0, 50 * 1024)):
        at_s = choose.expovariate(rate / 60)
        while at_s < 60 * minutes:
            tokens = choose.randint(*answers) if kind == "short" else choose.randint(64, 256)
            found.append(Offered(f"{kind}{len(found)}", at_s, prompt, tokens))
            at_s += choose.expovariate(rate / 60)
    return found


def simulated(answers: tuple[int, int], rounds: int, minutes: float) -> dict[str, Any]:
    """Have each scheduler serve the same arrivals, some times."""
    tokens: dict[str, list[float]] = {name: [] for name in SCHEDULERS}
    changes, longs = Counter[str](), Counter[str]()
    for round_ in range(rounds):
        offered = arrivals(SEED + round_, answers, minutes)
        longs["offered"] += sum(one.name.startswith("long") for one in offered)
        for name, make in SCHEDULERS.items():
            fleet = SimulatedDegrees(make(), tick_s=0.5, change_ticks=lambda: 2)
            fleet.run(offered, 60 * minutes)
            tokens[name].append(fleet.computed / (60 * minutes))
            changes[name] += len(fleet.changes)
            longs[name] += sum(one.startswith("long") for one in fleet.ended)
    others = [name for name in SCHEDULERS if name != "lengths"]
    return {
        "tokens_per_s": {name: statistics.median(values) for name, values in tokens.items()},
        **{f"over {name}": ratio(tokens["lengths"], tokens[name]) for name in others},
        "transformations": dict(changes),
        "long_ones_served": dict(longs),
    }


def schedulers(_: Setting, rounds: int, quick: bool, kept: Kept) -> dict[str, Any]:
    minutes = 2 if quick else MINUTES
    loads, rounds = ANSWERS[:2] if quick else ANSWERS, min(rounds, 2)
    return {f"answers of {least}-{most}": simulated((least, most), rounds, minutes) for least, most in loads}
