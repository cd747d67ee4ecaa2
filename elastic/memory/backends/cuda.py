"""Pages on an NVIDIA GPU: the driver's virtual memory management, through cuda-bindings.

Creating a page is slow (about 190 us per 2 MiB on an A100), mapping is fast (1.5 us), granting access is in between
(36 us, once per contiguous span). `cuMemUnmap` takes back exactly what one `cuMemMap` mapped, so pages are mapped one
by one. Whoever unmaps a page must know that no kernel that may read it is still running.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from elastic.errors import BackendUnavailable, CapacityError, ConfigError, StateError


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise BackendUnavailable(
            "CUDA places need the package cuda-bindings: pip install 'elastic-llm[cuda]'"
        ) from error
    return driver


def require_cuda(device: torch.device) -> None:
    """Raise an error that says what is missing before torch does."""
    if not torch.cuda.is_available():
        raise BackendUnavailable(f"place {device}: this torch sees no CUDA device; use a 'cpu' place")
    if (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"place {device}: there are {torch.cuda.device_count()} CUDA devices, counted from 0")


class CudaBackend:
    """`PageBackend` on `cuMemCreate`, `cuMemAddressReserve` and `cuMemMap`."""

    def __init__(self, device: torch.device, page_bytes: int | None = None) -> None:
        require_cuda(device)
        index = device.index or 0
        self.device = torch.device("cuda", index)
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._cu = cu = _driver()
        self._thread = threading.local()
        self._context = self._call("cuDevicePrimaryCtxRetain", index)
        location = cu.CUmemLocation()
        location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = index
        self._properties, access = cu.CUmemAllocationProp(), cu.CUmemAccessDesc()
        self._properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location = access.location = location
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._access = [access]
        minimum = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granularity = int(self._call("cuMemGetAllocationGranularity", self._properties, minimum))
        self.page_bytes = page_bytes or granularity
        if self.page_bytes % granularity:
            raise ConfigError(f"page_bytes={self.page_bytes} must be a multiple of {granularity} on {self.device}")
        self.mappings = 0
        self.created = 0
        self._handles: dict[int, Any] = {}  # page -> driver handle
        self._closed = False

    def reserve(self, nbytes: int, *, readable_gaps: bool = False) -> int:
        if readable_gaps:
            raise ConfigError("on CUDA unmapped addresses cannot be made readable; use a layout without gaps")
        return int(self._call("cuMemAddressReserve", nbytes, 0, 0, 0))

    def unreserve(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", address, nbytes)

    def create(self, pages: Sequence[int]) -> None:
        made: dict[int, Any] = {}
        try:
            for page in pages:
                made[page] = self._call("cuMemCreate", self.page_bytes, self._properties, 0)
        except BaseException:
            for handle in made.values():
                self._call("cuMemRelease", handle)
            raise
        self._handles |= made
        self.created = len(self._handles)

    def destroy(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._call("cuMemRelease", self._handles[page])
            del self._handles[page]
            self.created = len(self._handles)

    def map(self, address: int, pages: Sequence[int], *, readable_gaps: bool = False) -> None:
        mapped = 0
        try:
            for page in pages:
                at = address + mapped * self.page_bytes
                self._call("cuMemMap", at, self.page_bytes, 0, self._handles[page], 0)
                mapped += 1
            if pages:
                size = len(pages) * self.page_bytes
                self._call("cuMemSetAccess", address, size, self._access, len(self._access))
        except BaseException:
            for i in range(mapped):
                self._call("cuMemUnmap", address + i * self.page_bytes, self.page_bytes)
            raise
        self.mappings += mapped

    def unmap(self, address: int, count: int, *, readable_gaps: bool = False) -> None:
        for i in range(count):
            self._call("cuMemUnmap", address + i * self.page_bytes, self.page_bytes)
            self.mappings -= 1

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.destroy(list(self._handles))
            self._call("cuDevicePrimaryCtxRelease", self.device.index)

    def _call(self, name: str, *args: Any) -> Any:
        """Call the driver with the device's context current on this thread; an error becomes an exception."""
        if name != "cuDevicePrimaryCtxRetain" and not getattr(self._thread, "ready", False):
            self._check(self._cu.cuCtxSetCurrent(self._context)[0], "cuCtxSetCurrent")
            self._thread.ready = True
        code, *values = getattr(self._cu, name)(*args)
        self._check(code, name)
        return values[0] if values else None

    def _check(self, code: Any, name: str) -> None:
        if code == self._cu.CUresult.CUDA_SUCCESS:
            return
        if code == self._cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            free, total = torch.cuda.mem_get_info(self.device)
            message = f"{self.device} is out of memory in {name}"
            raise CapacityError(message, requested_bytes=self.page_bytes, free_bytes=free, total_bytes=total)
        raise StateError(f"the CUDA driver refused {name} on {self.device}: {code}")
