"""Mapping and unmapping pages through the ledger, beside the raw calls through the same binding.

    python benchmarks/pages.py [--device cuda:0]

Batches of 1,000 pages. `scattered`: no two pages neighbours in the file, so one system call a page, on CPU and CUDA
alike. `contiguous` (CPU): one call maps all; the raw figure is that one call. Target: <= 1.3 x raw. A round maps and
unmaps; pages are created beforehand, and what creating them costs is shown by itself.
"""

from __future__ import annotations

import statistics
from typing import Any

from common import arguments, finish, paired, ratio, seconds, show, table

from elastic.config import Place
from elastic.memory.pages.page_pool import PagePool
from elastic.memory.pages.virtual_range import VirtualRange
from elastic.memory.places import make_backend

PAGES = 1000


def raw(backend: Any, address: int, pages: list[int]) -> Any:
    """Time the system's own calls: a map for each run of pages, an unmap for each, nothing kept."""
    if backend.device.type == "cuda":
        return raw_cuda(backend, address, pages)
    from elastic.memory.backends import memfd
    from elastic.memory.backends.base import runs
    from elastic.memory.backends.libc import libc

    size, pieces = backend.page_bytes, runs(pages)

    def work() -> None:
        at = address
        for first, count in pieces:
            libc.mmap(at, count * size, memfd._READ_WRITE, memfd._MAPPED, backend._file, first * size)
            at += count * size
        libc.mmap(address, len(pages) * size, 0, memfd._RESERVED | memfd._MAP_FIXED, -1, 0)

    return work


def raw_cuda(backend: Any, address: int, pages: list[int]) -> Any:
    cu, size = backend._cu, backend.page_bytes
    handles = [backend._handles[page] for page in pages]

    def work() -> None:
        for i, handle in enumerate(handles):
            cu.cuMemMap(address + i * size, size, 0, handle, 0)
        cu.cuMemSetAccess(address, len(pages) * size, backend._access, len(backend._access))
        for i in range(len(pages)):
            cu.cuMemUnmap(address + i * size, size)

    return work


def ledger(pool: PagePool, range_: VirtualRange) -> Any:
    """Time the same through the pool: take, map, unmap, give back."""

    def work() -> None:
        pages = pool.allocate("kv", PAGES)
        range_.map(0, pages)
        pool.free(range_.unmap(0, PAGES))

    return work


def measure(name: str, device: str, rounds: int) -> dict[str, Any]:
    backend = make_backend(Place.parse(device))
    pool = PagePool(f"{device}#bench", backend, 2 * PAGES * backend.page_bytes, ready_pages=0)
    creating = seconds(lambda: pool.free(pool.allocate("kv", 2 * PAGES)), device)
    if name == "scattered":  # hold every other page, so that no two free ones are neighbours
        held = pool.allocate("kv", 2 * PAGES)
        pool.free(held[::2])
        holder = VirtualRange(pool, PAGES)
        holder.map(0, held[1::2])
    pages = sorted(pool._cached)[:PAGES]
    range_ = VirtualRange(pool, PAGES)
    works = {"raw": raw(backend, range_.address, pages), "ledger": ledger(pool, range_)}
    times = paired(works, device, 3 * rounds, warmup=5)
    result = {
        "case": name,
        "create_us_per_page": 1e6 * creating / (2 * PAGES),
        "raw_us_per_page": 1e6 * statistics.median(times["raw"]) / PAGES,
        "ledger_us_per_page": 1e6 * statistics.median(times["ledger"]) / PAGES,
        "ratio": ratio(times["ledger"], times["raw"]),
    }
    if name == "scattered":
        holder.close()
    range_.close()
    pool.close()
    return result


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    cases = ["scattered", "contiguous"] if options.device == "cpu" else ["scattered"]
    results = [measure(case, options.device, options.rounds) for case in cases]
    table(
        ["case", "create us/page", "raw us/page", "ledger us/page", "ledger/raw"],
        [
            [
                r["case"],
                *(f"{r[k]:.3f}" for k in ("create_us_per_page", "raw_us_per_page", "ledger_us_per_page")),
                show(r["ratio"]),
            ]
            for r in results
        ],
    )
    finish("pages", options.device, results)


if __name__ == "__main__":
    main()
