"""Two models on two places that lend each other layers, against two and against four plain instances (CoCoServe, 6.3).

    python benchmarks/lending.py [--device cuda:0]

On a CPU a place is a thread. Each model has its own place; *lending*, it has replicas of its last layers, half or all,
at the other's. "both": both models generate, half of the rows each; "one": only the first does, with all rows (four
plain instances: two of each model, which share its rows). Throughput in tokens per second of all that generate, latency
per token (P50 of steps), bytes of weights.
"""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any

import torch
from common import arguments, finish, ratio, show, small_model, table

import elastic

ROWS, PROMPT = 16, 32


class Instance:
    """A model that generates a batch in a thread."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def generate(self, rows: int, tokens: int, seconds: list[float]) -> None:
        torch.set_grad_enabled(False)
        ids = torch.ones(rows, PROMPT, dtype=torch.long, device=self.model.device)
        out = self.model(ids)
        cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
        for _ in range(tokens):
            start = time.perf_counter()
            token = self.model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
            seconds.append(time.perf_counter() - start)


def run(instances: list[Instance], rows: list[int], tokens: int) -> dict[str, float]:
    """All at the same time."""
    steps: list[list[float]] = [[] for _ in instances]
    threads = [
        threading.Thread(target=i.generate, args=(n, tokens, s)) for i, n, s in zip(instances, rows, steps, strict=True)
    ]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - start
    return {"tokens_per_s": sum(rows) * tokens / took, "step_s": statistics.median(s for one in steps for s in one)}


def lend(models: list[Any], places: list[str], layers: list[int]) -> None:
    for model, place in zip(models, reversed(places), strict=True):
        model.elastic.replicate(layers, place)


def weights_bytes(models: list[Any]) -> int:
    return sum(p.nbytes for model in models for p in model.parameters())


def layers_bytes(places: list[str], model: Any) -> int:
    """Of layers, at all places: of every model that uses them."""
    owners = [place.owners for place in model.elastic.status().places if place.name in places]
    return sum(size for here in owners for owner, size in here.items() if owner.startswith("layer:"))


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    on_cpu, device = options.device == "cpu", options.device
    count, tokens = (4, 4) if options.quick else (8, 24)
    hidden, inner = (256, 512) if options.quick else (768, 2048) if on_cpu else (4096, 11008)
    dtype = torch.float32 if on_cpu else torch.bfloat16
    made = [small_model(hidden, inner, count, dtype, device) for _ in range(4)]
    plain = [Instance(model) for model in made]
    lenders = [small_model(hidden, inner, count, dtype, device) for _ in range(2)]
    places = [f"{device}#a", f"{device}#b"]
    gib = 2 if on_cpu else 60
    for model, own, other in zip(lenders, places, reversed(places), strict=True):
        elastic.wrap(model, places=[f"{own}={gib}GiB", f"{other}={gib}GiB"])
    elastics = [Instance(model) for model in lenders]
    shares = {"elastic": [], "elastic, half": list(range(count // 2, count)), "elastic, all": list(range(count))}
    half = ROWS // 2
    loads = {"both": ([half, half], [half // 2] * 4), "one": ([ROWS], [half, half])}
    found: dict[str, dict[str, list[dict[str, float]]]] = {load: {} for load in loads}
    memory = {"two plain": weights_bytes(made[:2]), "four plain": weights_bytes(made)}
    rest = weights_bytes(lenders) - layers_bytes(places, lenders[0])
    for round_ in range(options.rounds + 1):
        for name, layers in shares.items():
            if layers:
                lend(lenders, places, layers)
            memory[name] = rest + layers_bytes(places, lenders[0])
            for load, (rows, split) in loads.items():
                results = {name: run(elastics[: len(rows)], rows, tokens)}
                if not layers:
                    four = plain if load == "both" else plain[:2]
                    results["two plain"] = run(plain[: len(rows)], rows, tokens)
                    results["four plain"] = run(four, split, tokens)
                if round_:
                    for key, result in results.items():
                        found[load].setdefault(key, []).append(result)
            for model, place in zip(lenders, reversed(places), strict=True):
                if layers:
                    model.elastic.evict(layers, place)
    for model in lenders:
        elastic.unwrap(model)
    results = {load: _of(runs, memory) for load, runs in found.items()}
    for load, rows in results.items():
        table(
            [load, "tokens/s", "of two plain", "of four plain", "step ms", "weights MB"],
            [
                [
                    name,
                    f"{r['tokens_per_s']:.0f}",
                    show(r["of_two"]),
                    show(r["of_four"]),
                    f"{r['step_ms']:.1f}",
                    f"{r['bytes'] / 1e6:.0f}",
                ]
                for name, r in rows.items()
            ],
        )
        print()
    finish("lending", device, results)


def _of(runs: dict[str, list[dict[str, float]]], memory: dict[str, int]) -> dict[str, Any]:
    speeds = {name: [one["tokens_per_s"] for one in each] for name, each in runs.items()}
    return {
        name: {
            "tokens_per_s": statistics.median(speeds[name]),
            "of_two": ratio(speeds[name], speeds["two plain"]),
            "of_four": ratio(speeds[name], speeds["four plain"]),
            "step_ms": 1e3 * statistics.median(one["step_s"] for one in each),
            "bytes": memory[name],
        }
        for name, each in runs.items()
    }


if __name__ == "__main__":
    main()
