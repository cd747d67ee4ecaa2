"""The seconds that work takes on a device, and which of several ways to do it takes the least."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from statistics import median

import torch

from elastic.openmp import single_thread

RACE_S = 0.003
"""Of each way in a race, if nothing disturbs it: one that takes less is repeated."""
RACE_TURNS = 30
"""The most turns of one way."""
RACE_MOST_S = 0.1
"""Of all turns of one way: after it, as with long work or on a busy machine, there are no more than two."""
FAR_BEHIND = 1.5
"""A way that takes so many times as long as the fastest has two turns, if these take long enough; the others five."""
WAITING = 4
"""Threads of small products that only wait for each other take less than so many times one thread's seconds."""


def seconds_of(work: Callable[[], object], device: torch.device, times: int = 1) -> float:
    """Time work: on a CPU once, by the host's clock; on CUDA so many times in a row, by the device's own, on average.

    One alone would be timed with the way from the host to the device, which in a model hides behind earlier kernels.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(times):
            work()
        end.record()
        end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / times


def race(
    ways: Mapping[str, Callable[[], object]],
    device: torch.device,
    times: int = 1,
    lower_bounds: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Return the least seconds of several ways to do one thing on a device; they take turns.

    Other processes have a processor for milliseconds at a time, and keep the second thread of a product from ending: a
    few turns of a way that takes 20 us may all fall into such a time, so it has many. `times` as of `seconds_of`.
    `lower_bounds` are seconds that ways take at least: one that cannot come near the fastest is left out.
    """
    bounds = lower_bounds or dict.fromkeys(ways, 0.0)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    running, fastest = sorted(ways, key=lambda name: bounds[name]), math.inf
    while running:
        for name in running:
            if taken[name] or bounds[name] * 0.8 < fastest:
                taken[name].append(seconds_of(ways[name], device, times))
                fastest = min(fastest, taken[name][-1])
        running = [name for name in running if taken[name] and len(taken[name]) < _turns(taken[name], fastest)]
    return {name: min(seconds) for name, seconds in taken.items() if seconds}


def _turns(taken: list[float], fastest: float) -> float:
    """Return how many turns a way is to have whose turns took so many seconds up to now."""
    few = 2 if min(taken) > FAR_BEHIND * fastest else 5
    return min(RACE_TURNS if sum(taken) < RACE_MOST_S else 2, max(few, RACE_S / max(min(taken), 1e-9)))


def time_ratio(after: Callable[[], object], before: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return what `after` takes of the time of `before`, by medians of so many turns: the least may be from a cache.

    On a CPU, where a few of them take many times as long with all threads as with one, these wait for processors that
    other processes have: the least times of one thread decide.
    """
    alone_s = math.inf, math.inf
    if device.type == "cpu" and torch.get_num_threads() > 1:
        with single_thread():
            alone_s = _of_both(min, [(seconds_of(after, device), seconds_of(before, device)) for _ in range(5)])
    pairs = list[tuple[float, float]]()
    while len(pairs) < repeats:
        pairs.append((seconds_of(after, device), seconds_of(before, device)))
        if len(pairs) == 3 and sum(_of_both(median, pairs)) > WAITING * sum(alone_s):
            return alone_s[0] / alone_s[1]
    after_s, before_s = _of_both(median, pairs)
    return after_s / before_s


def _of_both(statistic: Callable[[Iterable[float]], float], pairs: list[tuple[float, float]]) -> tuple[float, float]:
    after, before = zip(*pairs, strict=True)
    return statistic(after), statistic(before)
