"""The threads that torch computes with on a CPU: given back by those that compute seldom.

GNU's OpenMP keeps a team of threads for each thread that has computed in parallel, until that one ends. With more of
them in all than processors, a team sleeps between products instead of spinning for the next one, and has to be woken
each time: with two processors a product of 16 rows and 768 x 768 int4 weights takes 320 us instead of 145, and an
engine of the 2.6M model generates half of the tokens. So who computes beside a model, or has it served by a thread of
its own from now on, gives its team back when it is done; the next thing that it computes makes another, in some 0.1 ms.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

_SOFT = 1  # of omp_pause_resource_t: settings are kept


def release_threads() -> None:
    """Give back the threads that the calling thread has computed with; without any, nothing is done."""
    _pause()(_SOFT)


@contextmanager
def single_thread() -> Iterator[None]:
    """Have the calling thread compute alone, and no other one of the process; without OpenMP nothing is done."""
    set_threads = getattr(_library(), "omp_set_num_threads", None)
    if set_threads is None:
        yield
        return
    set_mkl_threads = getattr(_library(), "MKL_Set_Num_Threads_Local", lambda count: 0)
    threads, mkl_threads = torch.get_num_threads(), 0  # as the process has it
    try:
        mkl_threads = set_mkl_threads(1)
        set_threads(1)
        yield
    finally:
        set_threads(threads)
        set_mkl_threads(mkl_threads)


@cache
def _pause() -> Callable[[int], object]:
    """Return `omp_pause_resource_all` of the runtime that torch has, if that is GNU's; others need it not."""
    pause = getattr(_library(), "omp_pause_resource_all", None)
    if pause is None or hasattr(_library(), "__kmpc_fork_call"):  # LLVM's and Intel's
        return lambda kind: None
    pause.argtypes = [ctypes.c_int]
    return pause  # type: ignore[no-any-return]


@cache
def _library() -> ctypes.CDLL | None:
    """Return torch's library for CPUs, in which the functions of its OpenMP are found; None if it has none."""
    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return None
