"""The price of having the KV cache of layers at another place, beside a plain copy of its bytes, and what a generation
feels.

    python benchmarks/migrate_kv.py [--device cuda:0]

Two places on one device; a batch has read its prompts, and the KV caches of some layers go to the other place and back
while it rests. Peer: copies of the same keys and values into memory that is there already. "at rest": the place has
pages that the last caches left idle; else they are mapped first (on a CPU, the system has to clear them). Gaps between
tokens: the cache of one layer after another is on its way all the time, at a bounded rate on a CPU. Targets: those of
layers, 90 % of the copy's bytes per second and 1 ms of pause on CUDA; gaps within 5 % of a run at rest.
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

COPY_RATE = "1GB"
"""A second, on a CPU while a generation runs: there, copies and computation share the memory's speed."""
NAMES = "ab"


def wrap(model: Any, device: str, rate: str | None = None) -> Any:
    elastic.wrap(model, places=[f"{device}#{name}={budget(device, 4, 0.4)}" for name in NAMES], copy_rate=rate)
    return model.elastic


def prompts(model: Any, batch: int, tokens: int) -> torch.Tensor:
    return torch.arange(batch * tokens, device=model.device).view(batch, tokens) % model.config.vocab_size


def moves(model: Any, device: str, batch: int, tokens: int, count: int, rounds: int) -> dict[str, Any]:
    """Time the caches of so many layers at once, with so many tokens in each."""
    runtime, layers = wrap(model, device), range(count)
    home, target = (f"{device}#{name}" for name in NAMES)
    cache = returned_cache(model(prompts(model, batch, tokens)))
    sources = [kv.clone() for layer in cache.layers[:count] for kv in (layer.keys, layer.values)]
    targets = [torch.empty_like(kv).fill_(0) for kv in sources]
    nbytes = sum(kv.nbytes for kv in sources)

    def plain() -> None:
        for target, source in zip(targets, sources, strict=True):
            copy(target, source)

    copies: list[float] = []
    took: dict[str, list[float]] = {"at rest": [], "to be mapped": []}
    for _ in range(rounds + 2):
        for name, times in took.items():
            if name == "to be mapped":
                runtime.kv.trim()
                runtime.kv.trim()
            times.append(seconds(partial(runtime.migrate_kv, layers, target), device))
            assert runtime.events()[-1].moved_bytes >= nbytes
            runtime.migrate_kv(layers, home)
        copies += paired({"copy": plain}, device, 1, 0)["copy"]
    pauses = sorted(event.pause_ms for event in runtime.events())
    del cache
    elastic.unwrap(model)
    return {
        "tokens": tokens,
        "layers": count,
        "bytes": nbytes,
        "copy_gb_s": nbytes / 1e9 / statistics.median(copies[2:]),
        "ms": {name: 1e3 * statistics.median(times[2:]) for name, times in took.items()},
        "rate": {name: ratio(copies[2:], times[2:]) for name, times in took.items()},
        "pause_ms": {"p50": pauses[len(pauses) // 2], "max": pauses[-1]},
    }


def gaps(model: Any, device: str, batch: int, tokens: int, steps: int) -> list[float]:
    """Return the seconds of each decode step of one generation."""
    ids = prompts(model, batch, tokens)
    cache = returned_cache(model(ids))
    return [seconds(lambda: model(ids[:, :1], **{CACHE: cache}), device) for _ in range(steps)]


def latency(model: Any, device: str, batch: int, tokens: int, steps: int, generations: int) -> dict[str, Any]:
    """Compare gaps while the caches of one layer after another migrate, there and back, with those at rest."""
    runtime = wrap(model, device, COPY_RATE if device == "cpu" else None)
    homes, layers = [f"{device}#{name}" for name in NAMES], model.config.num_hidden_layers
    gaps(model, device, batch, tokens, 8)
    rest: list[list[float]] = []
    moving: list[list[float]] = []
    moved = 0
    for generation in range(generations):
        for moves_now in (False, True) if generation % 2 else (True, False):
            if not moves_now:
                rest.append(gaps(model, device, batch, tokens, steps))
                continue
            with Repeater(lambda n: runtime.migrate_kv([n % layers], homes[1 - n // layers % 2])) as mover:
                moving.append(gaps(model, device, batch, tokens, steps))
            moved += mover.done
            runtime.migrate_kv(range(layers), homes[0])
    elastic.unwrap(model)
    return {
        "gaps": generations * steps,
        "migrations": moved,
        "ms_at_rest": 1e3 * statistics.median(percentiles(rest, 0.5)),
        "p50": ratio(percentiles(moving, 0.5), percentiles(rest, 0.5)),
        "p99": ratio(percentiles(moving, 0.99), percentiles(rest, 0.99)),
        "throughput": ratio(list(map(sum, rest)), list(map(sum, moving))),
    }


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    on_cpu, device = options.device == "cpu", options.device
    counts = [1, 2] if options.quick else [1, 4, 8] if on_cpu else [1, 10, 20, 30, 40]
    contexts = [32, 64] if options.quick else [256, 1024] if on_cpu else [512, 1792]
    sizes = (256, 256) if options.quick else (512, 512) if on_cpu else (5120, 13824)
    batch, steps, generations = (4, 100, 10) if on_cpu else (8, 200, 12)
    if options.quick:
        steps, generations = 40, 2
    model = small_model(*sizes, counts[-1], torch.float32 if on_cpu else torch.bfloat16, device)
    measured = [moves(model, device, batch, n, count, options.rounds) for n in contexts for count in counts]
    felt = latency(model, device, batch, contexts[0], steps, generations)
    table(
        [
            "tokens",
            "layers",
            "MB",
            "copy GB/s",
            "at rest",
            "of the copy",
            "to be mapped",
            "of the copy",
            "pause ms",
            "most",
        ],
        [
            [
                m["tokens"],
                m["layers"],
                f"{m['bytes'] / 1e6:.1f}",
                f"{m['copy_gb_s']:.1f}",
                *(cell for name in m["ms"] for cell in (f"{m['ms'][name]:.2f} ms", show(m["rate"][name]))),
                f"{m['pause_ms']['p50']:.3f}",
                f"{m['pause_ms']['max']:.3f}",
            ]
            for m in measured
        ],
    )
    print(
        f"gaps while the cache of one layer after another is on its way ({felt['migrations']} migrations, "
        f"{felt['gaps']} gaps): P50 {show(felt['p50'])}, P99 {show(felt['p99'])}, "
        f"throughput {show(felt['throughput'])} of rest"
    )
    finish("migrate_kv", device, {"moves": measured, "latency": felt})


if __name__ == "__main__":
    main()
