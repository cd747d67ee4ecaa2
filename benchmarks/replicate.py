"""A batch shared out between replicas of all layers, beside one place alone; and the price of a replica.

    python benchmarks/replicate.py [--served]

On a CPU, two places with one thread each, so as many cores are needed; peer: the same model at one place, with one
thread. Decode steps of one generation after a prompt, prefill apart. Overlap: the share of the shorter place's time in
which the other computed too, by timestamps. Replicating: bytes per second against a plain copy of the same tensors,
with pages at rest from the last time ("mapped") and with pages that are mapped first. Targets: 1.6 x the throughput at
batch 8 and more, 80 % overlap, 90 % of the copy's bytes per second. A decode step that is bound by reading the weights,
as those of small batches are on a CPU, cannot be faster at two places that each read all of them. With `--served` also
the throughput of continuous batching, requests shared out between the places, beside one place.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch
from common import CACHE, arguments, budget, finish, paired, ratio, returned_cache, seconds, show, small_model, table
from continuous import BATCH_TOKENS, BLOCK, NEW, ours, prompts

import elastic
from elastic.engines.continuous import ContinuousEngine
from elastic.memory.copy_engine import copy


def throughput(model: Any, device: str, batch: int, sizes: tuple[int, int], rounds: int) -> dict[str, Any]:
    """Prefill and decode at one place and with replicas of all layers, in turn."""
    runtime, layers, target = model.elastic, range(model.config.num_hidden_layers), f"{device}#b"
    took: dict[str, dict[str, list[float]]] = {name: {"alone": [], "shared": []} for name in ("prefill", "decode")}
    overlaps: list[float] = []
    rows: list[int] = []
    for round_ in range(rounds + 1):
        for name in ("alone", "shared"):
            if name == "shared":
                runtime.replicate(layers, target)
            before = runtime.passes()[-1:] if runtime.passes() else ()
            times = generate(model, device, batch, *sizes)
            if name == "shared":
                mine = [p for p in runtime.passes() if not before or p[0].spans_s[0] > before[0][0].spans_s[0]]
                overlaps += [overlap(p) for p in mine[2:] if len(p) > 1]
                rows = [part.rows for part in mine[-1]]
                runtime.evict(layers, target)
            if round_:
                took["prefill"][name].append(times[0])
                took["decode"][name].append(sum(times[1:]))
    return {
        "batch": batch,
        "rows": rows,
        "decode_tokens_per_s": batch * sizes[1] / statistics.median(took["decode"]["shared"]),
        **{name: ratio(times["alone"], times["shared"]) for name, times in took.items()},
        "overlap": statistics.median(overlaps),
    }


def generate(model: Any, device: str, batch: int, prompt: int, tokens: int) -> list[float]:
    """Seconds of the prefill and of each step after it."""
    caches: list[Any] = []
    ids = torch.arange(batch * prompt, device=device).view(batch, prompt) % model.config.vocab_size
    times = [seconds(lambda: caches.append(returned_cache(model(ids))), device)]
    token = ids[:, :1]
    model(token, **{CACHE: caches[0]})
    return times + [seconds(lambda: model(token, **{CACHE: caches[0]}), device) for _ in range(tokens)]


def overlap(parts: Any) -> float:
    """Compare the times of two places in one pass."""
    both = sum(
        max(0.0, min(stop, other_stop) - max(start, other_start))
        for start, stop in parts[0].spans_s
        for other_start, other_stop in parts[1].spans_s
    )
    return both / min(part.seconds for part in parts)


def served(model: Any, device: str, count: int, rounds: int) -> dict[str, Any]:
    """Requests through the engine until the last has ended, at one place and with replicas of all layers, in turn."""
    runtime, layers, target = model.elastic, range(model.config.num_hidden_layers), f"{device}#b"
    asked = prompts(count, model.config.vocab_size)
    took: dict[str, list[float]] = {"alone": [], "shared": []}
    tokens: dict[str, Any] = {}
    with ContinuousEngine(model, block_tokens=BLOCK, max_batch_tokens=BATCH_TOKENS, share_prefixes=False) as engine:
        for round_ in range(rounds + 1):
            for name, times in took.items():
                if name == "shared":
                    runtime.replicate(layers, target)
                spent = seconds(lambda name=name: tokens.update({name: ours(engine, asked)}), device)
                if name == "shared":
                    overlaps = [overlap(parts) for parts in runtime.passes() if len(parts) > 1]
                    runtime.evict(layers, target)
                if round_:
                    times.append(spent)
    return {
        "requests": count,
        "tokens_per_s": {name: count * NEW / statistics.median(times) for name, times in took.items()},
        "throughput_ratio": ratio(took["alone"], took["shared"]),
        "overlap": statistics.median(overlaps),
        "same_continuations": statistics.mean(a == b for a, b in zip(*tokens.values(), strict=True)),
    }


def copies(model: Any, device: str, counts: list[int], rounds: int) -> list[dict[str, Any]]:
    """Replicating so many layers at once."""
    runtime, target, measured = model.elastic, f"{device}#b", []
    for count in counts:
        units = [runtime.weights.layers[i] for i in range(count)]
        sources = [
            tensor.clone() for unit in units for tensor in unit.blocks[unit.precision.key].show(unit.layout).values()
        ]
        targets = [torch.empty_like(tensor).fill_(0) for tensor in sources]

        def plain(pairs: list[Any]) -> None:
            for target, source in pairs:
                copy(target, source)

        plain_s: list[float] = []
        took: dict[str, list[float]] = {"mapped": [], "to be mapped": []}
        for _ in range(rounds + 2):
            plain_s += paired({"copy": partial(plain, list(zip(targets, sources, strict=True)))}, device, 1, 0)["copy"]
            took["mapped"].append(seconds(partial(runtime.replicate, range(count), target), device))
            runtime.evict(range(count), target)
            for pool in runtime.pools:
                pool.unmap_idle()
            took["to be mapped"].append(seconds(partial(runtime.replicate, range(count), target), device))
            runtime.evict(range(count), target)
        pauses = sorted(e.pause_ms for e in runtime.events() if len(e.action.layers) == count)
        nbytes = sum(tensor.nbytes for tensor in sources)
        del sources, targets
        measured.append(
            {
                "layers": count,
                "bytes": nbytes,
                "copy_gb_s": nbytes / 1e9 / statistics.median(plain_s[2:]),
                "ms": {key: 1e3 * statistics.median(value[2:]) for key, value in took.items()},
                "rate": {key: ratio(plain_s[2:], value[2:]) for key, value in took.items()},
                "pause_ms": {"p50": pauses[len(pauses) // 2], "max": pauses[-1]},
            }
        )
    return measured


def main() -> None:
    options = arguments(__doc__.splitlines()[0], served={"action": "store_true", "help": "continuous batching too"})
    on_cpu = options.device == "cpu"
    shape = (256, 512, 4) if options.quick else (1024, 2816, 12) if on_cpu else (5120, 13824, 20)
    sizes = (16, 8) if options.quick else (64, 24)
    batches = (8, 16) if options.quick else (8, 16, 32)
    counts = [1, 2] if options.quick else [1, 3, 6, 12] if on_cpu else [1, 5, 10, 15, 20]
    dtype = torch.float32 if on_cpu else torch.bfloat16
    model = small_model(*shape, dtype, options.device)
    places = [f"{options.device}#{label}={budget(options.device, 4, 0.4)}" for label in "ab"]
    elastic.wrap(model, places=places, kv_layout="batch_major" if on_cpu else None)  # one mapping a sequence
    shared = [throughput(model, options.device, batch, sizes, options.rounds) for batch in batches]
    batched = [served(model, options.device, n, options.rounds) for n in (batches if options.served else ())]
    copied = copies(model, options.device, counts, options.rounds)
    elastic.unwrap(model)
    table(
        ["batch", "rows", "prefill, of one place", "decode, of one place", "tokens/s", "overlap"],
        [
            [
                s["batch"],
                s["rows"],
                show(s["prefill"]),
                show(s["decode"]),
                f"{s['decode_tokens_per_s']:.1f}",
                f"{s['overlap']:.2f}",
            ]
            for s in shared
        ],
    )
    if batched:
        header = ["requests", "tokens/s at one place", "with replicas", "ratio", "overlap", "same continuations"]
        table(
            header,
            [
                [
                    s["requests"],
                    *(f"{speed:.0f}" for speed in s["tokens_per_s"].values()),
                    show(s["throughput_ratio"]),
                    f"{s['overlap']:.2f}",
                    f"{s['same_continuations']:.0%}",
                ]
                for s in batched
            ],
        )
    table(
        ["layers", "MB", "copy GB/s", "mapped", "of the copy", "to be mapped", "of the copy", "pause ms P50", "max"],
        [
            [
                c["layers"],
                f"{c['bytes'] / 1e6:.0f}",
                f"{c['copy_gb_s']:.1f}",
                *(cell for key in c["ms"] for cell in (f"{c['ms'][key]:.1f} ms", show(c["rate"][key]))),
                f"{c['pause_ms']['p50']:.3f}",
                f"{c['pause_ms']['max']:.3f}",
            ]
            for c in copied
        ],
    )
    finish("replicate", options.device, {"throughput": shared, "served": batched, "copies": copied})


if __name__ == "__main__":
    main()
