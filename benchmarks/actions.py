"""Swap, release and migrate of one layer, each with its way back, beside an earlier commit in the same rounds.

    python benchmarks/actions.py --earlier CHECKOUT [--device cuda:0]

Nothing else runs meanwhile, and pages are at rest from the last time: what is left is copies, checksums, and the
library's own work for an action, which is what a change of its structure could make longer. Target: the interval of the
earlier commit's time over this one's contains 1.00, or is above.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from common import (
    EARLIER,
    EarlierCheckout,
    arguments,
    budget,
    compute_rounds,
    finish,
    paired,
    ratio,
    show,
    small_model,
    table,
)

import elastic

REPEATS = 4
"""Of an action in one round: the first of them has other programs' data in the caches."""
LAYERS = 4


def places(device: str) -> list[str]:
    return [f"{device}#{label}={budget(device, 2, 0.4)}" for label in "ab"]


def works(device: str, quick: bool) -> dict[str, Callable[[], None]]:
    """Wrap a model, and return what takes each action there and back."""
    on_cpu = device == "cpu"
    shape = (256, 512) if quick else (768, 2048) if on_cpu else (4096, 11008)
    model = small_model(*shape, LAYERS, torch.float32 if on_cpu else torch.bfloat16, device)
    elastic.wrap(model, places=places(device), variants=("int4",))
    runtime = model.elastic
    there: dict[str, Callable[[int], Any]] = {
        "swap": lambda layer: runtime.swap(layer, "int4"),
        "release": runtime.release,
        "migrate": lambda layer: runtime.migrate(layer, f"{device}#b"),
    }
    back: dict[str, Callable[[int], Any]] = {
        "swap": runtime.restore,
        "release": runtime.restore,
        "migrate": lambda layer: runtime.migrate(layer, f"{device}#a"),
    }

    def repeat(verb: str) -> None:
        assert model.elastic is runtime  # which ends with its model
        for number in range(REPEATS):
            there[verb](number % LAYERS)
            back[verb](number % LAYERS)

    return {verb: lambda verb=verb: repeat(verb) for verb in there}  # type: ignore[misc]


def main() -> None:
    options = arguments(__doc__.splitlines()[0], **EARLIER)
    own = works(options.device, options.quick)
    if options.round_of:
        compute_rounds(own[options.round_of])
        return
    results = {}
    for verb, work in own.items():
        with ExitStack() as stack:
            taking_part = {"this": work}
            if options.earlier:
                taking_part["earlier"] = stack.enter_context(EarlierCheckout(options, verb)).round
            times = paired(taking_part, options.device, 4 * options.rounds)
        results[verb] = {
            "ms": 1e3 * statistics.median(times["this"]) / REPEATS,
            "over_earlier": ratio(times["earlier"], times["this"]) if options.earlier else None,
        }
    table(
        ["there and back", "ms", "earlier / this"],
        [[verb, f"{r['ms']:.2f}", show(r["over_earlier"]) if options.earlier else ""] for verb, r in results.items()],
    )
    finish("actions", options.device, results)


if __name__ == "__main__":
    main()
