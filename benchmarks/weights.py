"""The price of moving a layer's weights: release, restore, pauses, wrap and unwrap, and of a linear at rest.

    python benchmarks/weights.py [--device cuda:0] [--pages 2MiB]

Peer of the moves: a plain copy of the same bytes, from the same host memory into pages that are mapped already, in the
same round. A restore finds its pages either at rest (nobody needed them meanwhile) or has to map others (a KV cache
had them and gave them back). Pauses are those that the runtime measures at the gate.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import arguments, finish, paired, ratio, seconds, show, small_model, table

import elastic
from elastic.memory.copy_engine import copy

SHAPES = {"768 (28 MB)": (768, 2048), "2048 (218 MB)": (2048, 5504), "4096 (809 MB)": (4096, 11008)}
LINEARS = ((768, 768), (768, 2048), (4096, 4096))


def moves(name: str, model: Any, place: str, device: str, rounds: int) -> dict[str, Any]:
    """Release and restore of one layer beside a plain copy of its bytes."""
    elastic.wrap(model, places=[place])
    runtime = model.elastic
    runtime.release(0)
    layer = runtime.weights.layers[0]
    runtime.restore(0)
    resident = [p.data for p in model.model.layers[0].parameters()]
    host = [layer.host_copies[key].tensor for key, _ in model.model.layers[0].named_parameters()]
    nbytes = sum(p.nbytes for p in resident)

    def plain_copy() -> None:
        for target, source in zip(resident, host, strict=True):
            copy(target, source)

    times: dict[str, list[float]] = {key: [] for key in ("copy", "release", "restore", "release 2", "restore, mapped")}
    for round_ in range(rounds + 2):
        copied = seconds(plain_copy, device)
        resident = []
        took = {
            "copy": copied,
            "release": seconds(lambda: runtime.release(0), device),
            "restore": seconds(lambda: runtime.restore(0), device),
            "release 2": seconds(lambda: runtime.release(0), device),
        }
        layer.pool.unmap_idle()  # as if a cache had taken the pages and given them back
        took["restore, mapped"] = seconds(lambda: runtime.restore(0), device)
        resident = [p.data for p in model.model.layers[0].parameters()]
        if round_ >= 2:
            for key, value in took.items():
                times[key].append(value)
    resident = []
    pauses = sorted(event.pause_ms for event in runtime.events())
    elastic.unwrap(model)
    pair = [a + b for a, b in zip(times["release"], times["restore"], strict=True)]
    return {
        "layer": name,
        "bytes": nbytes,
        "copy_gb_s": nbytes / 1e9 / statistics.median(times["copy"]),
        "ms": {key: 1e3 * statistics.median(value) for key, value in times.items()},
        "rate_restore": ratio(times["copy"], times["restore"]),
        "rate_release": ratio(times["copy"], times["release"]),
        "rate_pair": ratio([2 * t for t in times["copy"]], pair),
        "rate_restore_mapped": ratio(times["copy"], times["restore, mapped"]),
        "pause_ms": {"p50": pauses[len(pauses) // 2], "max": pauses[-1]},
    }


def many(x: torch.Tensor, weight: torch.Tensor) -> None:
    for _ in range(200):
        F.linear(x, weight)


def linears(dtype: torch.dtype, place: str, device: str, rounds: int) -> list[dict[str, Any]]:
    """Microseconds of one linear on one token: stock parameter, parameter in pages, weight of a streamed layer."""
    rows = []
    for inputs, outputs in LINEARS:
        model = small_model(inputs, outputs if outputs > inputs else inputs, 1, dtype, device)
        mlp = outputs > inputs
        get = (lambda m: m.layers[0].mlp.up_proj) if mlp else (lambda m: m.layers[0].self_attn.q_proj)
        stock = get(model.model).weight.detach().clone()
        elastic.wrap(model, places=[place])
        linear, x = get(model.model), torch.randn(1, inputs, dtype=dtype, device=device)
        times = paired({"stock": partial(many, x, stock), "paged": partial(many, x, linear.weight)}, device, rounds)
        model.elastic.release(0)
        weights, streamers = model.elastic.weights.layers[0], model.elastic.weights.streamers
        (streamer,) = streamers.values()
        streamer.enter(weights)
        staged = partial(many, x, linear.weight)
        times |= paired({"staged": staged, "stock again": partial(many, x, stock)}, device, rounds)
        streamer.leave(weights)
        elastic.unwrap(model)
        rows.append(
            {
                "shape": f"{inputs} -> {outputs}",
                "us": {key: 1e6 / 200 * statistics.median(value) for key, value in times.items()},
                "paged_over_stock": ratio(times["paged"], times["stock"]),
                "staged_over_stock": ratio(times["staged"], times["stock again"]),
            }
        )
    return rows


def wrapping(dtype: torch.dtype, place: str, device: str, rounds: int) -> dict[str, float]:
    """Seconds of wrap and of unwrap for each GB of weights, beside the first copy of as many bytes."""
    model = small_model(2048, 5504, 4, dtype, device)
    size = sum(p.nbytes for p in model.model.layers.parameters()) / 1e9
    taken: dict[str, list[float]] = {"wrap": [], "unwrap": [], "clone": []}
    for _ in range(rounds):
        taken["clone"].append(seconds(lambda: [p.clone() for p in model.model.layers[0].parameters()], device) * 4)
        taken["wrap"].append(seconds(lambda: elastic.wrap(model, places=[place]), device))
        taken["unwrap"].append(seconds(lambda: elastic.unwrap(model), device))
    return {f"{key}_s_per_gb": statistics.median(value) / size for key, value in taken.items()}


def main() -> None:
    options = arguments(__doc__.splitlines()[0], pages={"help": "the size of pages; 2MiB: huge pages of the system"})
    place = f"{options.device}=8GiB" + (f"/{options.pages}" if options.pages else "")
    on_cpu = options.device == "cpu"
    dtype = torch.float32 if on_cpu else torch.bfloat16
    shapes = dict(list(SHAPES.items())[:1] if options.quick else SHAPES)
    results: dict[str, Any] = {
        "pages": options.pages,
        "moves": [
            moves(n, small_model(*s, 1, dtype, options.device), place, options.device, options.rounds)
            for n, s in shapes.items()
        ],
        "linear": linears(dtype, place, options.device, options.rounds),
        "wrap": wrapping(dtype, place, options.device, 3),
    }
    table(
        [
            "layer",
            "copy GB/s",
            "restore, at rest",
            "release",
            "both",
            "restore, mapped",
            "pause ms P50",
            "max",
        ],
        [
            [
                m["layer"],
                f"{m['copy_gb_s']:.1f}",
                *(show(m[key]) for key in ("rate_restore", "rate_release", "rate_pair", "rate_restore_mapped")),
                f"{m['pause_ms']['p50']:.3f}",
                f"{m['pause_ms']['max']:.3f}",
            ]
            for m in results["moves"]
        ],
    )
    print("(rates as shares of a plain copy's bytes per second)\n")
    table(
        ["linear, one token", "stock us", "in pages us", "ratio", "released, staged us", "ratio"],
        [
            [
                row["shape"],
                f"{row['us']['stock']:.1f}",
                f"{row['us']['paged']:.1f}",
                show(row["paged_over_stock"]),
                f"{row['us']['staged']:.1f}",
                show(row["staged_over_stock"]),
            ]
            for row in results["linear"]
        ],
    )
    print("\n" + ", ".join(f"{key}: {value:.3f}" for key, value in results["wrap"].items()))
    finish("weights", options.device, results)


if __name__ == "__main__":
    main()
