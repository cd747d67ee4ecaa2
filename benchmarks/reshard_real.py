"""The row `order` of `reshard.py`: the policy of lengths on two real ranks, against round robin and least load first.

The others are those of the simulated fleet (`tests/support/planning/simulated_degrees.py`), in the policy's place in a
fleet that is the same otherwise: an instance is chosen when a request comes, and becomes one with the other if it could
never hold the request. With two ranks there is not much to choose: what is asked is whether the order is that of the
simulated fleet of eight.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from common import SEED, Kept, ratio
from reshard_fleets import LENGTHS, mix_of, ranks, trace
from reshard_setting import Setting
from serving import Load, summary

import elastic
from elastic.controller.policies.lengths.policy import LengthPlan, LengthState
from elastic.controller.policies.lengths.snapshot import LengthSnapshot
from support.planning.simulated_degrees import Baseline, least_load_first, round_robin

OTHERS: dict[str, Callable[[], Baseline]] = {"round robin": round_robin, "least load first": least_load_first}
NAMES = ("lengths", *OTHERS)
BUSY = 0.9
"""Short requests come at this share of the rate that ranks serve by themselves."""


class InPlace:
    """Another scheduler in the place of the policy."""

    def __init__(self, scheduler: Baseline) -> None:
        self._scheduler = scheduler

    def decide(self, snapshot: LengthSnapshot, _: LengthState | None) -> LengthPlan:
        return replace(self._scheduler.decide(snapshot), state=LengthState())


def order(setting: Setting, rounds: int, quick: bool, kept: Kept) -> dict[str, Any]:
    """Tokens a second, of prompts and answers, until all requests have ended; and how often instances changed."""
    mix = mix_of(setting, quick, kept)
    tokens: dict[str, list[float]] = {name: [] for name in NAMES}
    changes = dict.fromkeys(NAMES, 0)
    length_s, longs = (4.0, 1) if quick else (12.0, 3)

    def take(name: str, seed: int) -> tuple[float, int]:
        arrivals = trace(seed, BUSY * mix.short_per_s, length_s, longs, mix.long_tokens)
        with ranks(setting, policy=LENGTHS) as engine:
            if name in OTHERS:
                use(engine, InPlace(OTHERS[name]()))
            return served(engine, arrivals), sum(event.kind == "resharded" for event in engine.events())

    for round_ in range(1 if quick else min(rounds, 3)):
        for name in random.sample(NAMES, len(NAMES)):
            tokens_per_s, changed = kept.take(f"order, {round_}, {name}", partial(take, name, SEED + round_))
            tokens[name].append(tokens_per_s)
            changes[name] += changed
            print(f"round {round_}, {name}: {tokens_per_s:.0f} tokens/s, {changed} changes", flush=True)
    return {
        "tokens_per_s": {name: summary(values) for name, values in tokens.items()},
        **{f"over {name}": ratio(tokens["lengths"], tokens[name]) for name in OTHERS},
        "transformations": changes,
        "order": sorted(NAMES, key=lambda name: -statistics.median(tokens[name])),
    }


def use(engine: elastic.Fleet, scheduler: InPlace) -> None:
    """Have a fleet's controller of lengths do what a scheduler says."""
    (controller,) = engine._policies._changing
    controller._policy = scheduler  # type: ignore[union-attr, assignment]


def served(engine: elastic.Fleet, arrivals: Any) -> float:
    """Have requests come when they are due; return the tokens a second until all have ended."""
    load, begin = Load(engine), time.perf_counter()
    for at_s, _, request in arrivals:
        time.sleep(max(0.0, begin + at_s - time.perf_counter()))
        load.submit(request)
    load.wait()
    ended = sum(len(request.prompt) + len(load.answers[request.id].tokens) for _, _, request in arrivals)
    return ended / (time.perf_counter() - begin)
