"""The row `pages` of `reshard.py`: the pages that ranks need besides while they come to share layers, and part.

By the ledger of each rank, with most of the KV cache in use: how many pages somebody owned at the most, beyond those
before and those afterwards. `base` is the paper's first form, which copies the keys and values that stay to pages in a
row before the others are given back; what it needs is counted, not run. Instances stop meanwhile, so that no request
takes pages. Both ranks are in this process.
"""

from __future__ import annotations

import random
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from common import SEED, Kept
from reshard_local import DEGREE, wrapped
from reshard_setting import BLOCK_TOKENS, SHARE, Setting, Sizes
from serving import Load, prompt, summary

import elastic
from elastic.cluster.control.stage_questions import PauseSteps
from elastic.engines.base import Request
from support.cluster.peak_pages import Owned, owned_pages

STEPS = (1, 2, None)
"""Layers at a pause; None: all."""
ANSWER = 160
"""Tokens: more than there are steps between the changes."""


def pages(setting: Setting, rounds: int, quick: bool, kept: Kept) -> dict[str, Any]:
    """Transient pages of a rank over those of the base form, by how many layers change at a pause."""
    models = [wrapped(setting, number, SHARE) for number in range(DEGREE)]
    figures: dict[str, list[float]] = {}
    try:
        with elastic.Fleet.of(*models, engine=setting.engine, beat_timeout_s=60, routing="round_robin") as fleet:
            asked = filled(fleet, setting.sizes)
            for _ in range(min(rounds, 2)):
                for layers_per_step in STEPS[:1] if quick else STEPS:
                    up, down = (changed(fleet, models, tp, layers_per_step) for tp in (DEGREE, 1))
                    for name, counts in (("up", up), ("down", down)):
                        key = f"{name}, {layers_per_step or 'all'} layers at a pause"
                        figures.setdefault(key, []).append(max(map(over_base, counts, [name] * DEGREE, models)))
            for request in asked:
                fleet.cancel(request)
    finally:
        for model in models:
            elastic.unwrap(model)
    return {f"{name}: of base": summary(values) for name, values in figures.items()}


def filled(fleet: elastic.Fleet, sizes: Sizes) -> list[str]:
    """Have as few requests at each rank as can take most of its cache, and go on; return their names."""
    load, choose = Load(fleet), random.Random(SEED)
    room = min(blocks[1] for blocks in fleet.capacity((1,)).values()) * BLOCK_TOKENS
    each = -(-int(sizes.use * room) // sizes.positions)
    tokens = int(sizes.use * room) // each - ANSWER
    answers = [load.submit(Request(prompt(tokens, choose), ANSWER, ignore_eos=True)) for _ in range(each * DEGREE)]
    while min(len(answer.tokens) for answer in answers) < 2:
        time.sleep(0.01)
    return list(load.answers)


def changed(fleet: elastic.Fleet, models: list[Any], tp: int, layers_per_step: int | None) -> list[Owned]:
    fleet._groups.ranks.ask_all(dict.fromkeys(("r0", "r1"), PauseSteps()))  # until layers have changed
    with ExitStack() as stack:
        counts = [stack.enter_context(owned_pages(model.elastic.pools[0])) for model in models]
        done = fleet.reshard(["r0", "r1"], tp=tp, exchange="stall", layers_per_step=layers_per_step)
        if done.status != "applied":
            raise RuntimeError(f"tp={tp} was {done.status}: {done.why}")
    return counts


def over_base(count: Owned, way: str, model: Any) -> float:
    """Return the transient pages of a rank over the keys and values that stay there."""
    whole = count.before if way == "up" else count.after
    return count.transient / ((whole - sum(model.elastic.layer_pages)) / DEGREE)
