"""What two ranks of one host do to each other: the seconds of an exchange, and how much more slowly one reads memory
while the other does. Each is a process on a core of its own.

The other one is a new interpreter, and waits for the imports of this file: there are none of an engine among them.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import secrets
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch

from elastic.cluster.peers.hub import PeerHub
from elastic.cluster.peers.transport import PeerTransport
from elastic.engines.pipeline.transport import Key
from elastic.errors import StateError
from elastic.estimation.profiles.spare_time import end_with_parent
from elastic.planning.measured_cost import LinearLatency

if TYPE_CHECKING:
    from elastic.engines.continuous.chunk_profile import Pace

SIZES = (1 << 10, 1 << 13, 1 << 16, 1 << 18)
"""Bytes of an exchange."""
WIDTH = 1024
"""Of hidden states."""
WEIGHT_BYTES = 2 * WIDTH * WIDTH * 4
"""Of the weights that are multiplied before and behind each exchange."""
READ_BYTES = 256 << 20
"""More than caches hold."""
WAIT_S = 60.0
REPEATS, ROUNDS = 100, 15
"""Exchanges of each size, and pairs of products, of which the median counts."""
BURST = 8
"""So many exchanges follow each other, before both processes rest."""


def measure_link(repeats: int = REPEATS, pace: Pace | None = None) -> LinearLatency:
    """Fit the seconds in which two ranks send each other so many bytes and have both.

    They are what a product of some weights and an exchange take longer than the product, in the median: whoever has
    waited computes with cold caches. `pace` is called behind each few exchanges by both processes, and may wait; it is
    pickled. Raises `StateError` where this process may run on one core alone, or the other one ends too early.
    """
    cores, key = two_cores(), secrets.token_bytes(16)
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=_exchange, args=("r1", "r0", key, theirs, repeats, cores[1], pace), daemon=True)
    child.start()
    theirs.close()  # so that its end is the end of the pipe
    try:
        taken = _exchange("r0", "r1", key, ours, repeats, cores[0], pace)
        child.join(WAIT_S)
    except (EOFError, ConnectionError) as error:
        child.join(WAIT_S)
        raise StateError(f"the process on core {cores[1]} ended with {child.exitcode}; measure again") from error
    finally:
        ours.close()
        child.kill()
    return line_through({size: statistics.median(seconds) for size, seconds in taken.items()})


def measure_contention(rounds: int = ROUNDS, pace: Pace | None = None) -> float:
    """Return by how much longer products with weights that no cache holds take while another core has such, too.

    The median of pairs: with the other one idle, and busy. `pace` is called behind each. Raises as `measure_link`.
    """
    cores = two_cores()
    context = multiprocessing.get_context("spawn")
    busy, ready, over = context.Event(), context.Event(), context.Event()
    child = context.Process(target=_read, args=(busy, ready, over, cores[1]), daemon=True)
    child.start()
    try:
        with on_core(cores[0]):
            weights = _large_weights()
            if not ready.wait(WAIT_S):
                raise StateError(f"no process on core {cores[1]} was ready within {WAIT_S:.0f} s; measure again")
            return max(0.0, statistics.median(_pair(weights, busy, pace) for _ in range(rounds)) - 1)
    finally:
        over.set()
        busy.set()
        child.join(10)
        child.kill()


def line_through(seconds: Mapping[int, float]) -> LinearLatency:
    """Return the line through the seconds of the fewest and of the most bytes: neither coefficient is below zero."""
    few, many = min(seconds), max(seconds)
    each = max(0.0, (seconds[many] - seconds[few]) / (many - few))
    return LinearLatency(max(0.0, seconds[few] - each * few), each)


def two_cores() -> Sequence[int]:
    """Return two cores that this process may run on. Raises `StateError` where there is one alone."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise StateError("this process may run on one core alone: there is no other rank to measure beside")
    return cores


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Have this thread, and what it computes, keep to one core meanwhile, as a rank does."""
    allowed, threads = os.sched_getaffinity(0), torch.get_num_threads()
    try:
        os.sched_setaffinity(0, {core})
        torch.set_num_threads(1)
        yield
    finally:
        os.sched_setaffinity(0, allowed)
        torch.set_num_threads(threads)


def _pair(weights: torch.Tensor, busy: Any, pace: Pace | None) -> float:
    """Return the seconds of a product beside another process that reads, over those of one by itself."""
    alone_s = _product_s(weights)
    busy.set()
    time.sleep(0.02)
    beside_s = _product_s(weights)
    busy.clear()
    time.sleep(0.02)
    if pace is not None:
        pace(alone_s + beside_s)
    return beside_s / alone_s


def _read(busy: Any, ready: Any, over: Any, core: int) -> None:
    """Compute products on another core while `busy` is set."""
    end_with_parent()
    with on_core(core):
        weights = _large_weights()
        _product_s(weights)
        ready.set()
        while not over.is_set():
            busy.wait()
            _product_s(weights, 1)


def _large_weights() -> torch.Tensor:
    return torch.zeros(READ_BYTES // 4 // WIDTH, WIDTH).add_(1.0)


def _product_s(weights: torch.Tensor, times: int = 3) -> float:
    hidden = torch.zeros(1, WIDTH)
    begin = time.perf_counter()
    for _ in range(times):
        torch.nn.functional.linear(hidden, weights)
    return time.perf_counter() - begin


def _exchange(
    name: str, other: str, key: bytes, pipe: Connection, repeats: int, core: int, pace: Pace | None
) -> dict[int, list[float]]:
    """Exchange tensors with another rank again and again; return the seconds of each, by bytes."""
    if name != "r0":
        end_with_parent()
    with on_core(core), closing(PeerHub(name, key)) as hub:
        pipe.send(hub.address)
        hub.meet({other: pipe.recv()})
        exchanges = _Exchanges(hub.transport("r0"), other)
        timings = {size: exchanges.measure(size, repeats, pace) for size in SIZES}
        pipe.send("done")
        pipe.recv()
        return timings


class _Exchanges:
    """One rank's side of exchanges with another one, which does the same."""

    def __init__(self, transport: PeerTransport, other: str) -> None:
        self._transport, self._other, self._step = transport, other, 0
        self._weights, self._hidden = torch.zeros(2 * WIDTH, WIDTH), torch.zeros(1, WIDTH)

    def measure(self, size: int, repeats: int, pace: Pace | None) -> list[float]:
        """Return the seconds of at least so many exchanges of some bytes.

        Whoever has rested meets the other one again before it is timed, and the first of each burst does not count:
        caches are as cold for it as the rest was long.
        """
        tensor, taken = torch.zeros(size // 4), list[float]()
        for _ in range(math.ceil(repeats / BURST)):
            self._swap(tensor)
            began_s = time.perf_counter()
            taken += [self._timed(tensor) for _ in range(BURST + 1)][1:]
            if pace is not None:
                pace(time.perf_counter() - began_s)
        return taken

    def _timed(self, tensor: torch.Tensor) -> float:
        """Return by how much longer a product and an exchange take than a product."""
        begin = time.perf_counter()
        torch.nn.functional.linear(self._hidden, self._weights)
        middle = time.perf_counter()
        self._swap(tensor)
        torch.nn.functional.linear(self._hidden, self._weights)
        return time.perf_counter() - middle - (middle - begin)

    def _swap(self, tensor: torch.Tensor) -> None:
        self._step += 1
        key = Key(self._step, 0)
        self._transport.send(self._other, tensor, key)
        self._transport.receive(self._other, tensor, key)
        self._transport.forget(self._step)
