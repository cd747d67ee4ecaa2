"""The simulated CUDA driver of this process: what tests ask of it, and what they have it do."""

from __future__ import annotations

import ctypes
import sys
import traceback
from functools import cache
from pathlib import Path
from typing import Any

OUT_OF_MEMORY = 2
"""`CUDA_ERROR_OUT_OF_MEMORY`."""
PAGE_CALLS = (
    "cuMemCreate",
    "cuMemRelease",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
)
"""The driver's virtual memory management: calls that `count` knows."""
COUNTERS = (
    "device_sync",
    "stream_sync",
    "event_sync",
    "memcpy",
    "host_bytes",  # copied between host memory and a device
    "pageable_h2d",
    "pageable_h2d_bytes",
    "pageable_d2h",
)
"""What `count` knows beside calls of the driver."""


_KEPT: list[Any] = []  # what the driver calls


@cache
def _driver() -> ctypes.CDLL | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    if not hasattr(driver, "sim_violations"):
        return None
    driver.sim_violation.restype = ctypes.c_char_p
    driver.sim_stat.argtypes, driver.sim_stat.restype = [ctypes.c_char_p], ctypes.c_uint64
    driver.sim_set_sched.argtypes = [ctypes.c_char_p]
    driver.sim_fail.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
    return driver


def path() -> str:
    """Return the file of the driver."""
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return next(line.split()[-1] for line in mapped if "/libcuda.so.1" in line)


def explain_faults() -> None:
    """Have the process say what it touched when it dies of a fault."""
    _loaded().sim_explain_faults()


def show_stacks() -> None:
    """Print the Python stack at each violation. For finding faults: it may block programs of several threads."""

    @ctypes.CFUNCTYPE(None, ctypes.c_char_p)
    def show(text: bytes) -> None:
        print(f"{text.decode()}, at", *traceback.format_stack(limit=12), sep="\n", file=sys.stderr, flush=True)

    _KEPT.append(show)
    _loaded().sim_on_violation(show)


def loaded() -> bool:
    """Return whether the CUDA driver of this process is the simulated one."""
    return _driver() is not None


def _loaded() -> ctypes.CDLL:
    driver = _driver()
    assert driver is not None, "the driver of this process is not simulated: `make simulate` runs such tests"
    return driver


def violations() -> list[str]:
    """Return the rules broken since the last `clear`, each in a sentence."""
    return [_loaded().sim_violation(i).decode() for i in range(_loaded().sim_violations())]


def clear() -> None:
    """Forget violations, failures still to come, and errors that stay with the process on a GPU."""
    _loaded().sim_clear_violations()
    _loaded().sim_reset_sticky()


def fail(call: str, nth: int = 1, code: int = OUT_OF_MEMORY) -> None:
    """Have the `nth` next call of that name of the driver fail with `code`; 0: none."""
    assert _is_call(call), f"the simulated driver has no {call}"
    _loaded().sim_fail(call.encode(), nth, code)


def count(name: str) -> int:
    """Count calls of the driver by name since the process began, or another of `COUNTERS`."""
    assert name in COUNTERS or _is_call(name), f"the simulated driver does not count {name}"
    return int(_loaded().sim_stat(name.encode()))


def _is_call(name: str) -> bool:
    return any(hasattr(_loaded(), name + version) for version in ("", "_v2", "_v3", "_v4"))


def schedule(name: str) -> None:
    """Choose when queued work runs: `eager`, `lazy` (not before somebody waits for it) or `random:SEED`."""
    _loaded().sim_set_sched(name.encode())
