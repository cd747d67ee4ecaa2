"""The cost of a wrapped model while nothing happens: decode steps and prefill beside the plain model.

    python benchmarks/overhead.py [--device cuda:0] [--earlier CHECKOUT]

One model and one stock cache (filled beforehand, so that it is left alone), wrapped for one half of each pair and not
for the other: the difference is the hooks, and where weights lie, as those of an unwrapped model are in new memory. The
microseconds spent in the hooks are timed too, inside running steps: they are below the spread of a step. *As loaded*:
pairs of fresh processes that load one checkpoint, of which one wraps it, in turn; what a user has with Elastic and
without. Target: the interval of the paired ratio contains 1.00, or it is at most 1.01; the hooks' share is at most 1 %.
With `--earlier`, decode steps under another checkout of Elastic are compared in such pairs, too: in the process of a
benchmark they take some 2 % longer.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import (
    CACHE,
    EARLIER,
    AnotherProcess,
    EarlierCheckout,
    arguments,
    compute_rounds,
    finish,
    llama,
    paired,
    ratio,
    returned_cache,
    seconds,
    show,
    table,
)
from transformers import AutoModelForCausalLM, DynamicCache

import elastic

STEPS = 5


def hook_microseconds(model: Any, work: Any) -> float:
    """Time spent in the hooks during one step, measured inside running steps: their code is not hot there."""
    spent: list[float] = []

    def timed(hook: Any) -> Any:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            result = hook(*args)
            spent.append(time.perf_counter() - start)
            return result

        return call

    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            hooks.update({key: timed(hook) for key, hook in hooks.items()})
    work()
    spent.clear()
    for _ in range(10):
        work()
    return 1e6 * sum(spent) / (10 * STEPS)


def steps(model: Any, cache: Any) -> Any:
    token = torch.ones(1, 1, dtype=torch.long, device=model.device)

    def work() -> None:
        for _ in range(STEPS):
            model(token, **{CACHE: cache})
        cache.crop(-STEPS)  # so that all steps are alike

    return work


def with_and_without(model: Any, work: Any, options: Any, rounds: int) -> dict[str, list[float]]:
    """Seconds of the same work on the model as it is and wrapped, in turn, the first of each pair by lot."""
    times: dict[str, list[float]] = {"plain": [], "wrapped": []}
    for round_ in range(rounds + 2):
        for name in random.sample(["plain", "wrapped"], 2):
            if name == "wrapped":
                elastic.wrap(model, places=[f"{options.device}=4GiB"])
            work()
            took = seconds(work, options.device)
            if name == "wrapped":
                elastic.unwrap(model)
            if round_ >= 2:
                times[name].append(took)
    return times


def filled(model: Any) -> Any:
    """Return a stock cache of 256 tokens."""
    prompt = torch.ones(1, 256, dtype=torch.long, device=model.device)
    return returned_cache(model(prompt, **{CACHE: DynamicCache(config=model.config)}))


def as_loaded(options: Any, pairs: int) -> dict[str, Any]:
    """Compare decode steps of fresh processes, plain and wrapped, over the same checkpoint: a ratio for each pair."""
    with tempfile.TemporaryDirectory() as folder:
        base_model(options).save_pretrained(folder)
        return of_processes(
            options,
            pairs,
            lambda: AnotherProcess(options, f"wrapped {folder}"),
            lambda: AnotherProcess(options, f"plain {folder}"),
        )


def over_earlier(options: Any, pairs: int) -> dict[str, Any]:
    """Compare decode steps under another checkout with this one's, in the same way: starts differ by some percent."""
    return of_processes(
        options, pairs, lambda: EarlierCheckout(options, "decode"), lambda: AnotherProcess(options, "decode")
    )


def of_processes(
    options: Any, pairs: int, above: Callable[[], AnotherProcess], below: Callable[[], AnotherProcess]
) -> dict[str, Any]:
    """Return the ratio of the times of two fresh processes, in turn, of so many pairs."""
    ratios = []
    for _ in range(pairs):
        with above() as first, below() as second:
            times = paired({"first": first.round, "second": second.round}, options.device, 4 * options.rounds)
        ratios.append(ratio(times["first"], times["second"])["median"])
    return ratio(ratios, [1.0] * pairs) | {"pairs": ratios}


def be_a_process(options: Any) -> None:
    """Be one of the processes of `as_loaded`."""
    kind, folder = options.round_of.split(" ", 1)
    model = AutoModelForCausalLM.from_pretrained(Path(folder), dtype="auto").to(options.device).eval()
    cache = filled(model)
    if kind == "wrapped":
        elastic.wrap(model, places=[f"{options.device}=4GiB"])
    compute_rounds(steps(model, cache))


def base_model(options: Any) -> Any:
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    return llama(12, dtype, options.device, quick=options.quick)


def main() -> None:
    of_processes = {"type": int, "help": "pairs of fresh processes: 5; on a GPU, where weights lie as before, none"}
    options = arguments(__doc__.splitlines()[0], **EARLIER, pairs=of_processes)
    if options.round_of and options.round_of != "decode":
        be_a_process(options)
        return
    model = base_model(options)
    prompt = torch.ones(1, 256, dtype=torch.long, device=options.device)
    cache = filled(model)
    if options.round_of:
        elastic.wrap(model, places=[f"{options.device}=4GiB"])
        compute_rounds(steps(model, cache))
        return
    decode = with_and_without(model, steps(model, cache), options, 4 * options.rounds)
    prefill = with_and_without(model, lambda: model(prompt), options, options.rounds)
    elastic.wrap(model, places=[f"{options.device}=4GiB"])
    hooks = hook_microseconds(model, steps(model, cache))
    elastic.unwrap(model)
    pairs = (5 if options.device == "cpu" else 0) if options.pairs is None else options.pairs
    loaded = as_loaded(options, pairs) if pairs else None
    earlier = over_earlier(options, max(pairs, 1)) if options.earlier else None
    step_us = 1e6 * statistics.median(decode["plain"]) / STEPS
    results = {
        "hooks_us_per_step": hooks,
        "step_us": step_us,
        "share": hooks / step_us,
        "decode_ratio": ratio(decode["wrapped"], decode["plain"]),
        "prefill_ratio": ratio(prefill["wrapped"], prefill["plain"]),
        "as_loaded": loaded,
        "prefill_ms": 1e3 * statistics.median(prefill["plain"]),
        "over_earlier": earlier,
    }
    ratios = [results["decode_ratio"], loaded, results["prefill_ratio"], earlier]
    table(
        [
            "hooks us/step",
            "share of step",
            "decode wrapped/plain",
            "as loaded",
            "prefill wrapped/plain",
            "earlier/wrapped",
        ],
        [[f"{hooks:.1f}", f"{hooks / step_us:.3%}", *(show(each) if each else "" for each in ratios)]],
    )
    finish("overhead", options.device, results)


if __name__ == "__main__":
    main()
