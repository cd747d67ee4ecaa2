"""Whole pages of host memory, and locking them by the CUDA driver.

The driver, not the runtime: a call that the runtime refuses stays behind as the error of the thread's next kernel.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from elastic.errors import CapacityError
from elastic.memory.pages.finalizers import call_at_death


def allocate(nbytes: int, purpose: str) -> torch.Tensor:
    """Allocate whole pages of the system, so that they can be locked, and go back when the tensor dies.

    Returns uint8 [nbytes], zeros. Raises `CapacityError`, which says for what purpose memory is short, and the remedy.
    """
    size = max(1, nbytes)
    try:
        memory = (ctypes.c_ubyte * size).from_buffer(mmap.mmap(-1, size))
    except (OSError, MemoryError) as error:
        import psutil

        host, message = psutil.virtual_memory(), f"host memory is short for {purpose}"
        raise CapacityError(
            message, requested_bytes=nbytes, free_bytes=host.available, total_bytes=host.total
        ) from error
    with torch.inference_mode(False):
        return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]


def page_lock(tensor: torch.Tensor) -> bool:
    """Page-lock the memory of a tensor, any shape, for all devices until it dies; return whether that was allowed.

    Needs a CUDA device in use.
    """
    from cuda.bindings import driver

    address = tensor.data_ptr()
    with _context(driver):
        code = driver.cuMemHostRegister(address, max(1, tensor.nbytes), driver.CU_MEMHOSTREGISTER_PORTABLE)[0]
    if code != driver.CUresult.CUDA_SUCCESS:
        return False
    call_at_death(tensor.untyped_storage(), _unlock, driver, address)
    return True


def is_locked(tensor: torch.Tensor) -> bool:
    """Return whether a tensor, any shape, is in page-locked host memory."""
    return tensor.device.type == "cpu" and tensor.is_pinned()


def _unlock(driver: Any, address: int) -> None:
    with _context(driver):
        driver.cuMemHostUnregister(address)


@contextmanager
def _context(driver: Any) -> Iterator[None]:
    """Have a context current on this thread: its own or, where it has none yet, that of any device in use."""
    index = None
    if not int(driver.cuCtxGetCurrent()[1]):
        devices = range(torch.cuda.device_count())
        index = next((i for i in devices if driver.cuDevicePrimaryCtxGetState(i)[2]), None)
    if index is not None:
        driver.cuCtxPushCurrent(driver.cuDevicePrimaryCtxRetain(index)[1])
    try:
        yield
    finally:
        if index is not None:
            driver.cuCtxPopCurrent()
            driver.cuDevicePrimaryCtxRelease(index)
