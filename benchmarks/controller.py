"""The cost of the controller: the CPU time of its thread as a share of a run, and its growth with the run.

    python benchmarks/controller.py [--device cuda:0]

Generations run one after another while the controller ticks at its default rate; `health().cost` is the thread's CPU
time over the run's time. Ticks by hand, 36,000 of them (an hour's worth), say what one costs (the median) at the
beginning and at the end. The microseconds of the hooks' counting are timed beside. Target: at most 0.5 % of the run,
flat over the hour.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from common import arguments, finish, llama, table

import elastic
from elastic.hooks.request_tracking import CacheRequestTracker

HOUR = 36_000


def microseconds(work: Any, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        work()
    return 1e6 * (time.perf_counter() - start) / count


def run(model: Any, device: str, seconds: float) -> dict[str, float]:
    """Generate for so long under a running controller."""
    prompt = torch.ones(4, 32, dtype=torch.long, device=device)
    controller = model.elastic.controller
    controller.tick()  # what is imported at the first look is not the price of a tick
    controller.start()
    until, tokens = time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        tokens += 4 * (model.generate(prompt, max_new_tokens=64, do_sample=False).shape[1] - 32)
    health = model.elastic.health()
    controller.stop()
    return {
        "share": health.cost,
        "ticks": health.ticks,
        "seconds": seconds,
        "tokens": tokens,
        "actions": health.actions,
    }


def hour(model: Any, ticks: int) -> list[float]:
    """Microseconds of a tick, in each tenth of an hour's worth, while requests come and go."""
    rt = model.elastic
    parts = []
    for part in range(10):
        spent: list[float] = []
        for i in range(ticks // 10):
            name = f"{part}-{i}"
            rt.counters.arrived(name, 10)
            rt.counters.produced(name, 4)
            rt.counters.ended(name, "completed")
            start = time.perf_counter()
            rt.controller.tick()
            spent.append(time.perf_counter() - start)
        parts.append(1e6 * statistics.median(spent))
    return parts


def counting(model: Any) -> float:
    """Microseconds that the hooks' counting adds to a forward pass."""
    generations, cache = CacheRequestTracker(model.elastic.counters), torch.nn.Module()
    token = torch.ones(4, 1, dtype=torch.long)

    def step() -> None:
        request = generations.begin(cache, token)
        assert request is not None
        generations.end(cache, request, failed=False)

    return microseconds(step, 10_000)


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    model = llama(12, dtype, options.device, quick=options.quick)
    elastic.wrap(model, places=[f"{options.device}=4GiB"], variants=("int8",), policy="balanced", controller=False)
    seconds = 3.0 if options.quick else 30.0
    runs = [run(model, options.device, seconds) for _ in range(1 if options.quick else 3)]
    parts = hour(model, HOUR // 10 if options.quick else HOUR)
    results = {
        "share": statistics.median(run_["share"] for run_ in runs),
        "runs": runs,
        "tick_us_by_tenth_of_an_hour": parts,
        "last_over_first": parts[-1] / parts[0],
        "counting_us_per_forward": counting(model),
        "snapshot_us": microseconds(model.elastic.snapshot, 2000),
    }
    elastic.unwrap(model)
    table(
        ["share of the run", "us/tick, first tenth", "last tenth", "us/snapshot", "us of counting/forward"],
        [
            [
                f"{results['share']:.3%}",
                f"{parts[0]:.0f}",
                f"{parts[-1]:.0f}",
                f"{results['snapshot_us']:.0f}",
                f"{results['counting_us_per_forward']:.1f}",
            ]
        ],
    )
    finish("controller", options.device, results)


if __name__ == "__main__":
    main()
