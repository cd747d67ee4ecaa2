"""The price of a resize, as a running generation feels it.

    python benchmarks/resize.py [--device cuda:0]

Decode steps with a KV limit that moves every fourth step (down to what is in use, to half of that, up again), paired
with the same steps at rest: the ratio of P50 and P99 step time, the pause at the safe point, and how fast a shrink
gives idle memory back.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from common import CACHE, arguments, finish, llama, ratio, returned_cache, seconds, show, table

import elastic

EVERY = 4
STEPS = 60


def episode(model: Any, resizing: bool, device: str) -> list[float]:
    """Step times, in seconds, of one generation of STEPS tokens after a prompt of 256."""
    runtime = model.elastic
    prompt = torch.ones(1, 256, dtype=torch.long, device=device)
    token = prompt[:, :1]
    cache = returned_cache(model(prompt))
    sizes = [runtime.kv.used_bytes, runtime.kv.used_bytes // 2, runtime.kv.maximum_bytes]
    times = []
    for step in range(STEPS):
        future = None
        if resizing and step % EVERY == 0:
            future = runtime.kv.resize(sizes[step // EVERY % 3], wait=False)
        times.append(seconds(lambda: model(token, **{CACHE: cache}), device))
        if future is not None:
            future.result()
    runtime.kv.resize(runtime.kv.maximum_bytes)
    return times


def release_rate(model: Any, device: str) -> float:
    """Bytes per second given back to the system by a shrink of an idle cache."""
    runtime = model.elastic
    rates = []
    for _ in range(5):
        model(torch.ones(4, 1024, dtype=torch.long, device=device))
        took = seconds(lambda: runtime.kv.resize(0), device)
        rates.append(runtime.events()[-1].released_bytes / took)
        runtime.kv.resize(runtime.kv.maximum_bytes)
    return statistics.median(rates)


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    model = elastic.wrap(llama(12, dtype, options.device, quick=options.quick), places=[f"{options.device}=4GiB"])
    runs: dict[bool, list[list[float]]] = {False: [], True: []}
    for round_ in range(options.rounds + 1):
        for resizing in (False, True):
            times = episode(model, resizing, options.device)
            if round_:
                runs[resizing].append(times)
    quantiles = {
        name: ratio(*([sorted(times)[index] for times in runs[resizing]] for resizing in (True, False)))
        for name, index in (("p50", STEPS // 2), ("p99", STEPS - 1))
    }
    pauses = sorted(event.pause_ms for event in model.elastic.events())
    results = {
        "step_ms": 1e3 * statistics.median(t for times in runs[False] for t in times),
        "step_ratio": quantiles,
        "pause_ms": {"p50": pauses[len(pauses) // 2], "p99": pauses[int(0.99 * len(pauses))]},
        "released_bytes_per_s": release_rate(model, options.device),
    }
    elastic.unwrap(model)
    table(
        ["step P50 ratio", "step P99 ratio", "pause P50 ms", "pause P99 ms", "given back GB/s"],
        [
            [
                show(quantiles["p50"]),
                show(quantiles["p99"]),
                f"{results['pause_ms']['p50']:.3f}",
                f"{results['pause_ms']['p99']:.3f}",
                f"{results['released_bytes_per_s'] / 1e9:.2f}",
            ]
        ],
    )
    finish("resize", options.device, results)


if __name__ == "__main__":
    main()
