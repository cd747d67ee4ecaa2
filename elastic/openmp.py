"""The threads that torch computes with on a CPU: given back by those that compute seldom.

GNU's OpenMP keeps a team of threads for each thread that has computed in parallel, until that one ends. With more of
them in all than processors, a team sleeps between products instead of spinning for the next one, and has to be woken
each time: with two processors a product of 16 rows and 768 x 768 int4 weights takes 320 us instead of 145, and an
engine of the 2.6M model generates half of the tokens. So who computes beside a model, or has it served by a thread of
its own from now on, gives its team back when it is done; the next thing that it computes makes another, in some 0.1 ms.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_SOFT = 1  # of omp_pause_resource_t: settings are kept


def release_threads() -> None:
    """Give back the threads that the calling thread has computed with; without any, nothing is done."""
    _pause()(_SOFT)


@cache
def _pause() -> Callable[[int], object]:
    """Return `omp_pause_resource_all` of the runtime that torch has, if that is GNU's; others need it not."""
    spec = find_spec("torch")
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        try:
            torch = ctypes.CDLL(str(Path(folder) / "lib" / "libtorch_cpu.so"))  # and what it depends on
        except OSError:
            continue
        pause = getattr(torch, "omp_pause_resource_all", None)
        if pause is not None and not hasattr(torch, "__kmpc_fork_call"):  # LLVM's and Intel's
            pause.argtypes = [ctypes.c_int]
            return pause  # type: ignore[no-any-return]
    return lambda kind: None
