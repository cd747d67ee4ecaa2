"""The seconds that work takes on a device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


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
