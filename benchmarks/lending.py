"""Two models on two places that lend each other layers, against two and against four plain instances (CoCoServe, 6.3).

    python benchmarks/lending.py [--device cuda:0]

On a CPU a place is a thread. Each model has its own place; *lending*, it has replicas of its last layers, half or all,
at the other's. "both": both models generate, half of the rows each; "one": only the first does, with all rows (four
plain instances: two of each model, which share its rows). All read their prompts, and when the last one has, all
decode: tokens per second of all that generate in each of the two, latency (P50 of prompts and of steps), bytes of
weights.
"""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from common import CACHE, arguments, budget, finish, ratio, returned_cache, seconds, show, small_model, table

import elastic

ROWS, PROMPT = 16, 32
PHASES = ("prompt", "decode")


@dataclass
class Instance:
    """A model that generates a batch in a thread."""

    model: Any

    def generate(self, rows: int, tokens: int, all_have_read: threading.Barrier, times: Times) -> None:
        torch.set_grad_enabled(False)
        ids = torch.ones(rows, PROMPT, dtype=torch.long, device=self.model.device)
        out: list[Any] = []
        times.prompt = seconds(lambda: out.append(self.model(ids)), str(self.model.device))
        cache, token = returned_cache(out[0]), out[0].logits[:, -1:].argmax(-1)
        all_have_read.wait()
        for _ in range(tokens):
            start = time.perf_counter()
            token = self.model(token, **{CACHE: cache}).logits[:, -1:].argmax(-1)
            times.steps.append(time.perf_counter() - start)


@dataclass
class Times:
    """Seconds of one instance."""

    prompt: float = 0.0
    steps: list[float] = field(default_factory=list)


def run(instances: list[Instance], rows: list[int], tokens: int) -> dict[str, float]:
    """Run all instances at the same time; return rates in tokens per second, and times."""
    times = [Times() for _ in instances]
    all_have_read = threading.Barrier(len(instances))
    threads = [
        threading.Thread(target=instance.generate, args=(n, tokens, all_have_read, times_))
        for instance, n, times_ in zip(instances, rows, times, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {
        "prompt": sum(rows) * PROMPT / max(times_.prompt for times_ in times),
        "decode": sum(rows) * tokens / max(sum(times_.steps) for times_ in times),
        "prompt_s": statistics.median(times_.prompt for times_ in times),
        "step_s": statistics.median(step for times_ in times for step in times_.steps),
    }


def lend(models: list[Any], places: list[str], layers: list[int]) -> None:
    for model, place in zip(models, reversed(places), strict=True):
        model.elastic.replicate(layers, place)


def weights_bytes(models: list[Any]) -> int:
    return sum(p.nbytes for model in models for p in model.parameters())


def layers_bytes(places: list[str], model: Any) -> int:
    """Return the bytes of layers at all places, those of every model that uses them."""
    owners = [place.owners for place in model.elastic.status().places if place.name in places]
    return sum(size for owned in owners for owner, size in owned.items() if owner.startswith("layer:"))


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
    for model, home, other in zip(lenders, places, reversed(places), strict=True):
        elastic.wrap(model, places=[f"{place}={budget(device, 2, 0.4)}" for place in (home, other)])
    elastics = [Instance(model) for model in lenders]
    shares = {"elastic": [], "elastic, half": list(range(count // 2, count)), "elastic, all": list(range(count))}
    half = ROWS // 2
    loads = {"both": ([half, half], [half // 2] * 4), "one": ([ROWS], [half, half])}
    by_load: dict[str, dict[str, list[dict[str, float]]]] = {load: {} for load in loads}
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
                        by_load[load].setdefault(key, []).append(result)
            for model, place in zip(lenders, reversed(places), strict=True):
                if layers:
                    model.elastic.evict(layers, place)
    for model in lenders:
        elastic.unwrap(model)
    results = {load: _of(runs, memory) for load, runs in by_load.items()}
    for load, rows in results.items():
        heads = [f"{phase} {what}" for phase in PHASES for what in ("tokens/s", "of two plain", "of four plain")]
        table(
            [load, *heads, "prompt ms", "step ms", "weights MB"],
            [
                [
                    name,
                    *(cell for phase in PHASES for cell in _cells(r[phase])),
                    f"{r['prompt_ms']:.1f}",
                    f"{r['step_ms']:.1f}",
                    f"{r['bytes'] / 1e6:.0f}",
                ]
                for name, r in rows.items()
            ],
        )
        print()
    finish("lending", device, results)


def _of(runs: dict[str, list[dict[str, float]]], memory: dict[str, int]) -> dict[str, Any]:
    def rates(name: str, phase: str) -> list[float]:
        return [run_[phase] for run_ in runs[name]]

    def speeds(name: str, phase: str) -> dict[str, Any]:
        return {
            "tokens_per_s": statistics.median(rates(name, phase)),
            "of_two": ratio(rates(name, phase), rates("two plain", phase)),
            "of_four": ratio(rates(name, phase), rates("four plain", phase)),
        }

    return {
        name: {
            **{phase: speeds(name, phase) for phase in PHASES},
            "prompt_ms": 1e3 * statistics.median(rates(name, "prompt_s")),
            "step_ms": 1e3 * statistics.median(rates(name, "step_s")),
            "bytes": memory[name],
        }
        for name in runs
    }


def _cells(speeds: dict[str, Any]) -> list[str]:
    return [f"{speeds['tokens_per_s']:.0f}", show(speeds["of_two"]), show(speeds["of_four"])]


if __name__ == "__main__":
    main()
