"""Pages of 2 MiB on a CPU, which are huge pages of the system, beside pages of 64 KiB.

    python benchmarks/page_size.py

What creating, showing and hiding memory costs, in microseconds for 2 MiB; and steps of models whose weights lie in
such pages, as shares of the plain model's: one token of each of some requests, with 64 tokens of context, which lie by
heads in the small pages and by tokens in the large ones, as is the rule.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from common import CACHE, arguments, finish, paired, ratio, returned_cache, show, small_model, table, twin

import elastic
from elastic.memory.backends.memfd import MemfdBackend

SIZES = {"64 KiB": 64 << 10, "2 MiB": 2 << 20}
MEMORY = 256 << 20
SHAPES = {
    "768, 12 layers, float32": (768, 2048, 12, torch.float32),
    "2048, 8 layers, float32": (2048, 5504, 8, torch.float32),
    "2048, 8 layers, bfloat16": (2048, 5504, 8, torch.bfloat16),
}
REQUESTS = (1, 16)
CONTEXT, STEPS = 64, 3


def memory(rounds: int, nbytes: int) -> dict[str, dict[str, float]]:
    """Time the calls of the backend; return the median microseconds for 2 MiB, by page size."""
    results = {}
    for name, size in SIZES.items():
        backend, pages = MemfdBackend(size), range(nbytes // size)
        address = backend.reserve(nbytes)
        works = {
            "create": lambda backend=backend, pages=pages: backend.create(pages),
            "show": lambda backend=backend, pages=pages, address=address: backend.map(address, pages),
            "hide": lambda backend=backend, pages=pages, address=address: backend.unmap(address, len(pages)),
            "give back": lambda backend=backend, pages=pages: backend.destroy(pages),
        }
        times = in_turn(works, rounds)
        results[name] = {work: 1e6 * statistics.median(took) * (2 << 20) / nbytes for work, took in times.items()}
        backend.close()
    return results


def in_turn(works: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Time works that follow each other, in this order."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for round_ in range(rounds + 1):
        for name, work in works.items():
            took = paired({name: work}, "cpu", 1, warmup=0)[name]
            times[name] += took if round_ else []
    return times


def steps(model: Any, requests: int) -> Callable[[], Any]:
    """Return some steps of so many requests."""
    prompt = torch.randint(0, 1000, (requests, CONTEXT), generator=torch.Generator().manual_seed(0))
    cache = returned_cache(model(prompt, use_cache=True))
    token = torch.ones(requests, 1, dtype=torch.long)

    def work() -> None:
        for _ in range(STEPS):
            model(token, **{CACHE: cache})

    return work


def models(shape: tuple[int, int, int, torch.dtype], rounds: int) -> list[dict[str, Any]]:
    """Time steps of a model by page size, beside the plain one."""
    plain = small_model(*shape, "cpu")
    made = {"plain": plain}
    for name, size in SIZES.items():
        place = elastic.Place(f"cpu#{size}", torch.device("cpu"), 3 << 30, page_bytes=size)
        made[name] = elastic.wrap(twin(plain), places=[place], policy="manual")
    results = []
    for requests in REQUESTS:
        times = paired({name: steps(model, requests) for name, model in made.items()}, "cpu", rounds)
        results.append(
            {
                "requests": requests,
                "plain_ms": 1e3 * statistics.median(times["plain"]) / STEPS,
                **{name: ratio(times[name], times["plain"]) for name in SIZES},
                "2 MiB over 64 KiB": ratio(times["2 MiB"], times["64 KiB"]),
            }
        )
    for name in SIZES:
        elastic.unwrap(made[name])
    return results


def main() -> None:
    options = arguments(str(__doc__).splitlines()[0])
    shapes = {"small": (64, 128, 2, torch.float32)} if options.quick else SHAPES
    calls = memory(options.rounds, MEMORY // 8 if options.quick else MEMORY)
    table(
        ["us for 2 MiB", *SIZES], [[work, *(f"{calls[name][work]:.1f}" for name in SIZES)] for work in calls["2 MiB"]]
    )
    results = {name: models(shape, options.rounds) for name, shape in shapes.items()}
    table(
        ["step", "requests", "plain ms", *SIZES, "2 MiB over 64 KiB"],
        [
            [
                name,
                row["requests"],
                f"{row['plain_ms']:.1f}",
                *(show(row[key]) for key in (*SIZES, "2 MiB over 64 KiB")),
            ]
            for name, rows in results.items()
            for row in rows
        ],
    )
    finish("page_size", options.device, {"us_for_2_mib": calls, "steps": results})


if __name__ == "__main__":
    main()
