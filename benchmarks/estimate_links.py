"""What two processes of one machine do to each other: an exchange over the connections that ranks have, and how much
more slowly one reads memory while the other does."""

from __future__ import annotations

import functools
import multiprocessing
import os
import statistics
import time
from typing import Any

import torch

from elastic.cluster.peers.hub import PeerHub
from elastic.engines.pipeline.transport import Key
from elastic.planning.measured_cost import LinearLatency

SIZES = (1 << 10, 1 << 13, 1 << 16, 1 << 18)
WIDTH = 1024
"""Of hidden states; 8 MiB of weights."""
READ_BYTES = 256 << 20
"""More than caches hold."""
KEY = b"of two processes of one benchmark"


def measured_link(repeats: int = 100) -> LinearLatency:
    """Fit the seconds in which two ranks, a core each, send each other so many bytes and have both.

    They are what a product of some weights and an exchange take longer than the product, in the median of pairs:
    whoever has waited computes with cold caches.
    """
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_rank, args=("r1", "r0", theirs, repeats, 1))
    child.start()
    cores = os.sched_getaffinity(0)
    try:
        taken = _rank("r0", "r1", ours, repeats, 0)
        child.join(60)
    finally:
        os.sched_setaffinity(0, cores)
        child.kill()
    return fitted([(size, statistics.median(seconds)) for size, seconds in taken.items()])


def measured_contention(rounds: int = 15) -> float:
    """Return by how much longer products with weights that no cache holds take while another core has such, too.

    Median of pairs: with the other one idle, and busy.
    """
    context = multiprocessing.get_context("spawn")
    busy, ready, over = context.Event(), context.Event(), context.Event()
    child = context.Process(target=_read, args=(busy, ready, over), daemon=True)
    child.start()
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {0})
        ready.wait()
        return max(0.0, statistics.median(_pair(busy) for _ in range(rounds)) - 1)
    finally:
        over.set()
        busy.set()
        os.sched_setaffinity(0, cores)
        child.join(10)
        child.kill()


def _pair(busy: Any) -> float:
    """Return the seconds of a product beside another process that reads, over those of one by itself."""
    alone_s = _product_s()
    busy.set()
    time.sleep(0.02)
    beside_s = _product_s()
    busy.clear()
    time.sleep(0.02)
    return beside_s / alone_s


def _read(busy: Any, ready: Any, over: Any) -> None:
    """Compute products on another core while `busy` is set."""
    os.sched_setaffinity(0, {1})
    torch.set_num_threads(1)
    _product_s()
    ready.set()
    while not over.is_set():
        busy.wait()
        _product_s(1)


@functools.cache
def _large_weights() -> torch.Tensor:
    return torch.zeros(READ_BYTES // 4 // WIDTH, WIDTH).add_(1.0)


def _product_s(times: int = 3) -> float:
    weights, hidden = _large_weights(), torch.zeros(1, WIDTH)
    begin = time.perf_counter()
    for _ in range(times):
        torch.nn.functional.linear(hidden, weights)
    return time.perf_counter() - begin


def fitted(points: list[tuple[int, float]]) -> LinearLatency:
    """Return the line through the smallest and the largest size: neither coefficient is below zero."""
    (few, least), (many, most) = points[0], points[-1]
    each = max(0.0, (most - least) / (many - few))
    return LinearLatency(max(0.0, least - each * few), each)


def _rank(name: str, other: str, pipe: Any, repeats: int, core: int) -> dict[int, list[float]]:
    """Exchange tensors with another rank again and again; return the seconds of each, by bytes."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    weights, hidden = torch.zeros(2 * WIDTH, WIDTH), torch.zeros(1, WIDTH)

    def product() -> None:
        torch.nn.functional.linear(hidden, weights)

    hub = PeerHub(name, KEY)
    try:
        pipe.send(hub.address)
        hub.meet({other: pipe.recv()})
        transport = hub.transport("r0")
        found: dict[int, list[float]] = {}
        step = 0
        for size in SIZES:
            tensor = torch.zeros(size // 4)
            for _ in range(repeats):
                begin, step = time.perf_counter(), step + 1
                product()
                middle = time.perf_counter()
                transport.send(other, tensor, Key(step, 0))
                transport.receive(other, tensor, Key(step, 0))
                transport.forget(step)
                product()
                end = time.perf_counter()
                found.setdefault(size, []).append(end - middle - (middle - begin))
        pipe.send("done")
        pipe.recv()
        return found
    finally:
        hub.close()


if __name__ == "__main__":
    print(measured_link(), measured_contention())
