"""The price of swapping a layer to int4 and back: the copy, the whole, the pause, and what running generations feel.

    python benchmarks/swap.py [--device cuda:0]

Peer of the copy: a plain copy of as many bytes from host memory that is locked, on CUDA, as the store's is, into memory
that is there already. A swap finds the pages of the packed layer at rest from the last time, or has to map others
(a KV cache had them). Gaps between tokens: each commit swaps one layer and restores another, so that as many are packed
as in the run at rest beside it.
"""

from __future__ import annotations

import statistics
import threading
from functools import partial
from typing import Any

import torch
from common import (
    CACHE,
    arguments,
    budget,
    finish,
    paired,
    percentiles,
    ratio,
    returned_cache,
    seconds,
    show,
    small_model,
    table,
)

import elastic
from elastic.memory.copy_engine import copy
from elastic.memory.rate_limit import RateLimiter

SHAPES = {"768 (28 MB)": (768, 2048), "2048 (218 MB)": (2048, 5504), "4096 (809 MB)": (4096, 11008)}
QUICK = {"256 (3 MB)": (256, 512)}
STEPS_PER_COMMIT = 8
COPY_RATE = "2GB"
"""A second, on a CPU: there, copies and computation share the memory's speed."""


def moves(name: str, model: Any, device: str, rounds: int) -> dict[str, Any]:
    """Swap and restore of one layer, beside a plain copy of as many bytes."""
    elastic.wrap(model, places=[f"{device}=8GiB"], variants=("int4", "int8"))
    runtime = model.elastic
    layer = runtime.weights.layers[0]
    form = layer.with_variant("int4")
    plain_source = torch.randint(0, 255, (form.nbytes,), dtype=torch.uint8)
    if device != "cpu":
        plain_source = plain_source.pin_memory()
    plain_target = torch.zeros(form.nbytes, dtype=torch.uint8, device=device)
    full_source, full_target = plain_source.repeat(8)[: layer.nbytes], plain_target.repeat(8)[: layer.nbytes]
    copier = runtime.weights.streamer(layer).copier
    runtime.swap(0, "int4")
    packed = layer.sources(layer.blocks[layer.precision.key].show(form.layout), form)
    works = {
        "plain copy": partial(copy, plain_target, plain_source),
        "copy": lambda: copier.copy(packed, RateLimiter()).finish(),
        "plain copy, full": partial(copy, full_target, full_source),
    }
    times = paired(works, device, rounds)
    packed.clear()
    runtime.restore(0)
    for key in ("swap", "restore", "swap, mapped", "int8 to int4"):
        times[key] = []
    for round_ in range(rounds + 2):
        took = {
            "swap": seconds(lambda: runtime.swap(0, "int4"), device),
            "restore": seconds(lambda: runtime.restore(0), device),
        }
        layer.pool.unmap_idle()  # as if a cache had taken the pages and given them back
        took["swap, mapped"] = seconds(lambda: runtime.swap(0, "int4"), device)
        runtime.swap(0, "int8")
        took["int8 to int4"] = seconds(lambda: runtime.swap(0, "int4"), device)
        runtime.restore(0)
        if round_ >= 2:
            for key, value in took.items():
                times[key].append(value)
    pauses = sorted(event.pause_ms for event in runtime.events())
    elastic.unwrap(model)
    return {
        "layer": name,
        "full_bytes": layer.nbytes,
        "int4_bytes": form.nbytes,
        "share_of_full": form.nbytes / layer.nbytes,
        "copy_gb_s": form.nbytes / 1e9 / statistics.median(times["copy"]),
        "ms": {key: 1e3 * statistics.median(value) for key, value in times.items()},
        "rate_of_copy": ratio(times["plain copy"], times["copy"]),
        "rate_of_swap": ratio(times["plain copy"], times["swap"]),
        "rate_between_variants": ratio(times["plain copy"], times["int8 to int4"]),
        "rate_of_restore": ratio(times["plain copy, full"], times["restore"]),
        "pause_ms": {"p50": pauses[len(pauses) // 2], "p99": pauses[int(len(pauses) * 0.99)], "max": pauses[-1]},
    }


class Mover(threading.Thread):
    """Swaps one layer and restores another whenever it is asked to; the number of packed ones stays."""

    def __init__(self, runtime: Any, layers: int) -> None:
        super().__init__(daemon=True)
        self.runtime, self.layers = runtime, layers
        self.asked = threading.Semaphore(0)
        self.done = 0
        self.ending = False

    def run(self) -> None:
        packed, full = list(range(0, self.layers, 2)), list(range(1, self.layers, 2))
        while True:
            self.asked.acquire()
            if self.ending:
                return
            out, new = packed.pop(0), full.pop(0)
            packed.append(new)
            full.append(out)
            self.runtime.apply([elastic.Swap((new,), "int4"), elastic.Restore((out,))])
            self.done += 1


def gaps(model: Any, device: str, tokens: int, mover: Mover | None) -> list[float]:
    """Seconds of each decode step of one generation."""
    token = torch.ones(1, 1, dtype=torch.long, device=device)
    cache = returned_cache(model(token.repeat(1, 64)))
    times = []
    for step in range(tokens):
        if mover and step % STEPS_PER_COMMIT == 0:
            mover.asked.release()
        times.append(seconds(lambda: model(token, **{CACHE: cache}), device))
    return times


def latency(device: str, dtype: torch.dtype, quick: bool) -> dict[str, Any]:
    """Gaps of runs with commits and of runs at rest, one after the other."""
    layers, generations, tokens = (4, 2, 3 * STEPS_PER_COMMIT) if quick else (12, 20, 260)
    on_cpu = device == "cpu"
    (shape,) = QUICK.values() if quick else [(768, 2048) if on_cpu else (4096, 11008)]
    model = small_model(*shape, layers, dtype, device)
    rate = COPY_RATE if on_cpu else None
    elastic.wrap(model, places=[f"{device}={budget(device, 4, 0.4)}"], variants=("int4",), copy_rate=rate)
    runtime = model.elastic
    runtime.swap(range(0, layers, 2), "int4")
    moving: list[list[float]] = []
    resting: list[list[float]] = []
    commits = 0
    gaps(model, device, 32, None)
    for generation in range(generations):
        for moves_now in (False, True) if generation % 2 else (True, False):
            runtime.restore()
            runtime.swap(range(0, layers, 2), "int4")
            if not moves_now:
                resting.append(gaps(model, device, tokens, None))
                continue
            mover = Mover(runtime, layers)
            mover.start()
            moving.append(gaps(model, device, tokens, mover))
            mover.ending = True
            mover.asked.release()
            mover.join()
            commits += mover.done
    events = [event for event in runtime.events() if len(event.action.layers) == 1]
    touched = {layer for event in events for layer in event.action.layers}
    elastic.unwrap(model)
    return {
        "gaps": generations * tokens,
        "commits": commits,
        "steps_per_commit": generations * tokens / commits,
        "layers_touched": len(touched),
        "ms_at_rest": {f"p{int(100 * s)}": 1e3 * statistics.median(percentiles(resting, s)) for s in (0.5, 0.99)},
        "ms_moving": {f"p{int(100 * s)}": 1e3 * statistics.median(percentiles(moving, s)) for s in (0.5, 0.99)},
        "p50_ratio": ratio(percentiles(moving, 0.5), percentiles(resting, 0.5)),
        "p99_ratio": ratio(percentiles(moving, 0.99), percentiles(resting, 0.99)),
        "throughput": ratio([sum(run) for run in resting], [sum(run) for run in moving]),
        "pause_ms_p99": sorted(event.pause_ms for event in events)[int(0.99 * (len(events) - 1))],
    }


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    on_cpu = options.device == "cpu"
    dtype = torch.float32 if on_cpu else torch.bfloat16
    shapes = QUICK if options.quick else SHAPES
    results: dict[str, Any] = {
        "moves": [
            moves(n, small_model(*s, 1, dtype, options.device), options.device, options.rounds)
            for n, s in shapes.items()
        ],
        "latency": latency(options.device, dtype, options.quick),
    }
    table(
        ["layer", "int4 of full", "copy GB/s", "copy", "int8 to int4", "swap", "restore", "pause ms P50", "P99", "max"],
        [
            [
                m["layer"],
                f"{m['share_of_full']:.3f}",
                f"{m['copy_gb_s']:.1f}",
                *(show(m[f"rate_{k}"]) for k in ("of_copy", "between_variants", "of_swap", "of_restore")),
                *(f"{m['pause_ms'][key]:.3f}" for key in ("p50", "p99", "max")),
            ]
            for m in results["moves"]
        ],
    )
    print("(rates as shares of a plain copy's bytes per second)\n")
    keys = list(results["moves"][0]["ms"])
    table(["layer, ms", *keys], [[m["layer"], *(f"{m['ms'][key]:.2f}" for key in keys)] for m in results["moves"]])
    lat = results["latency"]
    print(
        f"\ngaps between tokens, {lat['gaps']} each, a commit every {lat['steps_per_commit']:.1f} steps, "
        f"{lat['layers_touched']} layers: P50 {lat['ms_moving']['p50']:.2f} ms, {show(lat['p50_ratio'])} of rest; "
        f"P99 {lat['ms_moving']['p99']:.2f} ms, {show(lat['p99_ratio'])} of rest; "
        f"throughput {show(lat['throughput'])} of rest"
    )
    finish("swap", options.device, results)


if __name__ == "__main__":
    main()
