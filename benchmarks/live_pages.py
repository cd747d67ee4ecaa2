"""Pages of a GPU mapped and unmapped while kernels run: what the calls take, and what the kernels feel.

    python benchmarks/live_pages.py --device cuda:0

The driver's documentation leaves open whether mapping, granting access and unmapping wait for the device. Each call is
timed on an idle device and behind a queue of products that lasts some milliseconds: `waits` is the share of that queue
that the call waited for. `slower` is the time of the queue with pages mapped and unmapped meanwhile, over the queue
alone. With two GPUs or more, also copies of such pages from one to the other, beside copies of plain tensors.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import arguments, finish, paired, ratio, show, table

from elastic.config import Place
from elastic.memory.pages.page_pool import PagePool
from elastic.memory.pages.virtual_range import VirtualRange
from elastic.memory.places import make_backend

BATCHES = ((1, 1), (16, 1), (256, 1), (16, 16))
"""Pages, and of how many of the driver's smallest each is."""
QUEUE_MS = 20.0


def queue_of_products(device: str, milliseconds: float) -> Callable[[], None]:
    """Make a function that queues products for about so long, and returns before they are done."""
    size = 4096 if milliseconds > 1 else 64
    x = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        begin.record()
        x @ x
        end.record()
        end.synchronize()
    count = max(1, int(milliseconds / max(begin.elapsed_time(end), 1e-3)))

    def queue() -> None:
        for _ in range(count):
            x @ x

    return queue


def milliseconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def calls(backend: Any, address: int, pages: list[int], queue: Callable[[], None]) -> dict[str, float]:
    """Time the driver's calls for some pages on an idle device, and each kind of them behind a queue."""
    cu, size, took = backend._cu, backend.page_bytes, {}
    handles, places = [backend._handles[page] for page in pages], range(address, address + len(pages) * size, size)
    works: dict[str, Callable[[], Any]] = {
        "map": lambda: [cu.cuMemMap(at, size, 0, handle, 0) for at, handle in zip(places, handles, strict=True)],
        "access": lambda: cu.cuMemSetAccess(address, len(pages) * size, backend._access, len(backend._access)),
        "unmap": lambda: [cu.cuMemUnmap(at, size) for at in places],
    }
    for where, before in (("idle", lambda: None), ("queue", queue)):
        for name, work in works.items():
            torch.cuda.synchronize(backend.device)
            before()
            took[f"{name}, {where}"] = milliseconds(work)
    return took


def batch(device: str, count: int, times: int, queue: Callable[[], None], rounds: int) -> dict[str, Any]:
    """Time batches of `count` pages, mapped and unmapped, so many times as large as the smallest."""
    smallest = make_backend(Place.parse(device))
    page_bytes = times * smallest.page_bytes
    smallest.close()
    backend = make_backend(Place(device, torch.device(device), None, page_bytes))
    pool = PagePool(f"{device}#bench", backend, count * backend.page_bytes, ready_pages=0)
    range_ = VirtualRange(pool, count)
    pages = pool.allocate("kv", count)
    runs = [calls(backend, range_.address, pages, queue) for _ in range(rounds + 2)][2:]

    def beside() -> None:
        queue()
        range_.map(0, pages)
        range_.unmap(0, count)

    times = paired({"queue": queue, "beside": beside}, device, rounds)
    pool.free(pages)
    range_.close()
    pool.close()
    medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    queue_ms = 1e3 * statistics.median(times["queue"])
    return {
        "pages": count,
        "page_bytes": backend.page_bytes,
        "ms": medians,
        "queue_ms": queue_ms,
        "waits": {
            call: max(0.0, medians[f"{call}, queue"] - medians[f"{call}, idle"]) / queue_ms
            for call in ("map", "access", "unmap")
        },
        "slower": ratio(times["beside"], times["queue"]),
    }


def between_devices(rounds: int) -> dict[str, float]:
    """Compare copies of 64 MiB from one GPU to another: pages over plain tensors. The pages live until the end."""
    tensors: dict[str, list[torch.Tensor]] = {"plain": [], "pages": []}
    for index in (0, 1):
        place = Place.parse(f"cuda:{index}")
        backend = make_backend(place)
        count = (64 << 20) // backend.page_bytes
        pool = PagePool(f"cuda:{index}#bench", backend, count * backend.page_bytes, ready_pages=0)
        range_ = VirtualRange(pool, count)
        range_.map(0, pool.allocate("kv", count))
        tensors["pages"].append(range_.storage(0, count * backend.page_bytes, lambda: None).tensor(torch.uint8))
        tensors["plain"].append(torch.empty(64 << 20, dtype=torch.uint8, device=f"cuda:{index}"))

    def copy(kind: str) -> Callable[[], Any]:
        return lambda: tensors[kind][1].copy_(tensors[kind][0])

    times = paired({kind: copy(kind) for kind in tensors}, "cuda:0", rounds)
    return ratio(times["pages"], times["plain"])


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    queue = queue_of_products(options.device, 0.1 if options.quick else QUEUE_MS)
    batches = BATCHES[::3] if options.quick else BATCHES
    results: dict[str, Any] = {"batches": [batch(options.device, *pages, queue, options.rounds) for pages in batches]}
    keys = list(results["batches"][0]["ms"])
    table(
        [
            "pages",
            "MiB each",
            *(f"{key}, ms" for key in keys),
            "map waits",
            "access waits",
            "unmap waits",
            "queue beside/alone",
        ],
        [
            [
                row["pages"],
                row["page_bytes"] >> 20,
                *(f"{row['ms'][key]:.3f}" for key in keys),
                *(f"{share:.0%}" for share in row["waits"].values()),
                show(row["slower"]),
            ]
            for row in results["batches"]
        ],
    )
    if torch.cuda.device_count() > 1:
        results["between_devices"] = between_devices(options.rounds)
        print(f"copies of pages between two GPUs, over plain tensors': {show(results['between_devices'])}")
    finish("live_pages", options.device, results)


if __name__ == "__main__":
    main()
