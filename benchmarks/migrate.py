"""The price of migrating layers to another place, beside a plain copy of as many bytes, and what a generation feels.

    python benchmarks/migrate.py [--device cuda:0] [--rate 500MB]

Layers go to the other of two places on one device and back. Peer: copies of the same tensors into memory that is there
already. "mapped" is a migration whose pages are at rest from the last time; else they are mapped first. Gaps between
tokens: one layer after another is on its way all the time, at a bounded rate on a CPU. Targets: 90 % of the copy's
bytes per second, 1 ms of pause on CUDA; gaps within 5 % of rest.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch
from common import (
    CACHE,
    Repeater,
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

COPY_RATE = "250MB"
"""A second while a model computes, on a CPU: there, copies and computation share the memory's speed."""


def places(device: str) -> list[str]:
    return [f"{device}#{label}={budget(device, 4, 0.4)}" for label in "ab"]


def counts(device: str, layer_bytes: int, quick: bool) -> list[int]:
    """Return numbers of layers to be moved at once: on a GPU as many as its memory holds five times."""
    if device == "cpu" or quick:
        return [1, 2] if quick else [1, 3, 6, 9, 12]
    most = torch.cuda.get_device_properties(device).total_memory // (5 * layer_bytes)
    return [count for count in (1, 10, 20, 30, 40) if count <= most]


def moves(model: Any, device: str, numbers: list[int], rounds: int) -> list[dict[str, Any]]:
    """Migrations of so many layers at once."""
    elastic.wrap(model, places=places(device))
    runtime, measured = model.elastic, []
    target = f"{device}#b"
    for count in numbers:
        layers = range(count)
        units = [runtime.weights.layers[i] for i in layers]
        sources = [
            tensor.clone() for unit in units for tensor in unit.blocks[unit.precision.key].show(unit.layout).values()
        ]
        targets = [torch.empty_like(tensor).fill_(0) for tensor in sources]

        def plain(pairs: list[Any]) -> None:
            for target, source in pairs:
                copy(target, source)

        took: dict[str, list[float]] = {"mapped": [], "to be mapped": []}
        copies: list[float] = []
        budget = runtime.status().places
        for _ in range(rounds + 2):
            copies += paired({"copy": partial(plain, list(zip(targets, sources, strict=True)))}, device, 1, 0)["copy"]
            took["mapped"].append(seconds(partial(runtime.migrate, layers, target), device))
            runtime.migrate(layers, f"{device}#a")
            for pool in runtime.pools:
                pool.unmap_idle()
            took["to be mapped"].append(seconds(partial(runtime.migrate, layers, target), device))
            runtime.migrate(layers, f"{device}#a")
        pauses = sorted(e.pause_ms for e in runtime.events() if len(e.action.layers) == count)
        assert runtime.status().places[0].owners == budget[0].owners
        nbytes = sum(tensor.nbytes for tensor in sources)
        measured.append(
            {
                "layers": count,
                "bytes": nbytes,
                "copy_gb_s": nbytes / 1e9 / statistics.median(copies[2:]),
                "ms": {key: 1e3 * statistics.median(value[2:]) for key, value in took.items()},
                "rate": {key: ratio(copies[2:], value[2:]) for key, value in took.items()},
                "pause_ms": {"p50": pauses[len(pauses) // 2], "max": pauses[-1]},
            }
        )
    elastic.unwrap(model)
    return measured


def gaps(model: Any, device: str, tokens: int) -> list[float]:
    """Return the seconds of each decode step of one generation."""
    token = torch.ones(1, 1, dtype=torch.long, device=device)
    cache = returned_cache(model(token.repeat(1, 64)))
    return [seconds(lambda: model(token, **{CACHE: cache}), device) for _ in range(tokens)]


def latency(device: str, dtype: torch.dtype, generations: int, tokens: int, rate: str, quick: bool) -> dict[str, Any]:
    """Compare gaps while layers of the same model migrate, there and back, and while those of another do, with rest."""
    on_cpu, layers = device == "cpu", 12
    shape = (768, 2048, layers) if on_cpu or quick else (4096, 11008, layers)
    model, other = (small_model(*shape, dtype, device) for _ in range(2))
    for wrapped in (model, other):
        elastic.wrap(wrapped, places=places(device), copy_rate=rate if on_cpu else None)
    gaps(model, device, 32)
    runs: dict[str, list[list[float]]] = {"at rest": [], "itself": [], "another": []}
    moved = 0
    for generation in range(generations):
        names = list(runs)
        turn = generation % 3
        for name in names[turn:] + names[:turn]:
            if name == "at rest":
                runs[name].append(gaps(model, device, tokens))
                continue
            runtime = (model if name == "itself" else other).elastic
            with Repeater(lambda n, r=runtime: r.migrate(n % layers, f"{device}#{'ba'[n // layers % 2]}")) as mover:
                runs[name].append(gaps(model, device, tokens))
            moved += mover.done
    for wrapped in (model, other):
        elastic.unwrap(wrapped)
    rest = {share: percentiles(runs["at rest"], share) for share in (0.5, 0.99)}
    total = {name: [sum(run) for run in times] for name, times in runs.items()}
    return {
        "gaps": generations * tokens,
        "copy_rate": rate if on_cpu else None,
        "migrations": moved,
        "ms_at_rest": {f"p{int(100 * s)}": 1e3 * statistics.median(rest[s]) for s in rest},
        **{
            name: {
                "p50": ratio(percentiles(runs[name], 0.5), rest[0.5]),
                "p99": ratio(percentiles(runs[name], 0.99), rest[0.99]),
                "throughput": ratio(total["at rest"], total[name]),
            }
            for name in ("itself", "another")
        },
    }


def main() -> None:
    help_ = "bytes a second beside a generation, on a CPU"
    options = arguments(__doc__.splitlines()[0], rate={"default": COPY_RATE, "help": help_})
    on_cpu = options.device == "cpu"
    dtype = torch.float32 if on_cpu else torch.bfloat16
    shape = (512, 1024) if options.quick else (1024, 2816) if on_cpu else (5120, 13824)
    layer_bytes = (4 * shape[0] ** 2 + 3 * shape[0] * shape[1]) * dtype.itemsize
    numbers = counts(options.device, layer_bytes, options.quick)
    model = small_model(*shape, numbers[-1], dtype, options.device)
    measured = moves(model, options.device, numbers, options.rounds)
    del model
    generations, tokens = (2, 40) if options.quick else (12, 200)
    results = {
        "moves": measured,
        "latency": latency(options.device, dtype, generations, tokens, options.rate, options.quick),
    }
    table(
        ["layers", "MB", "copy GB/s", "mapped", "of the copy", "to be mapped", "of the copy", "pause ms P50", "max"],
        [
            [
                m["layers"],
                f"{m['bytes'] / 1e6:.0f}",
                f"{m['copy_gb_s']:.1f}",
                *(cell for key in m["ms"] for cell in (f"{m['ms'][key]:.1f} ms", show(m["rate"][key]))),
                f"{m['pause_ms']['p50']:.3f}",
                f"{m['pause_ms']['max']:.3f}",
            ]
            for m in measured
        ],
    )
    lat = results["latency"]
    for name in ("itself", "another"):
        print(
            f"gaps while a layer of {name} is on its way: P50 {show(lat[name]['p50'])}, P99 {show(lat[name]['p99'])}, "
            f"throughput {show(lat[name]['throughput'])} of rest"
        )
    finish("migrate", options.device, results)


if __name__ == "__main__":
    main()
