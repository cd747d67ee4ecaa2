"""Pages on an NVIDIA GPU: the driver's virtual memory management, through cuda-bindings.

Creating a page is slow (about 190 us per 2 MiB on an A100), mapping is fast (1.5 us), granting access is in between
(36 us, once per contiguous span). `cuMemUnmap` takes back exactly what one `cuMemMap` mapped, so pages are mapped one
by one. Whoever unmaps a page must know that no kernel that may read it is still running: the driver's documentation
says of `cuMemUnmap` and `cuMemSetAccess` only that they may wait for the device, not that they do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from elastic.errors import BackendUnavailable, CapacityError, ConfigError, StateError
from elastic.memory.backends.base import page_size
from elastic.memory.backends.peers import can_access
from elastic.memory.backends.streams import give_back_cached, require_no_capture, synchronize


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
    if torch.cuda._is_in_bad_fork():
        raise BackendUnavailable(f"place {device}: CUDA was in use when this process was forked; spawn it instead")
    if not torch.cuda.is_available():
        raise BackendUnavailable(f"place {device}: this torch sees no CUDA device; use a 'cpu' place")
    if (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"place {device}: there are {torch.cuda.device_count()} CUDA devices, counted from 0")


class CudaBackend:
    """`PageBackend` on `cuMemCreate`, `cuMemAddressReserve` and `cuMemMap`.

    Pages can be read and written by the device and by every visible one that has access to its memory: torch copies
    between two devices from the source's stream, whatever memory that is. The device's primary context is retained and
    never released, as torch may use it without a retain of its own.
    """

    pages_per_huge_page = 1

    def __init__(self, device: torch.device, page_bytes: int | None = None, *, shareable: bool = False) -> None:
        """`shareable`: pages can be exported to other processes of the host."""
        require_cuda(device)
        index = device.index or 0
        self.device = torch.device("cuda", index)
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._cu = cu = _driver()
        self._call("cuInit", 0)
        pages = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        if not self._call("cuDeviceGetAttribute", pages, index):
            raise BackendUnavailable(
                f"place {self.device}: this GPU, or the profile of this virtual GPU, has no virtual memory management; "
                "use another one, or a 'cpu' place"
            )
        self._context = self._call("cuDevicePrimaryCtxRetain", index)
        self._descriptors = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        """The kind of handle that processes hand each other as a file descriptor."""
        self._properties = cu.CUmemAllocationProp()
        self._properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location = self._location(index)
        if shareable:
            self._properties.requestedHandleTypes = self._descriptors
        devices = range(torch.cuda.device_count())
        self._access = [self._access_of(other) for other in devices if other == index or can_access(other, index)]
        minimum = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granularity = int(self._call("cuMemGetAllocationGranularity", self._properties, minimum))
        self.page_bytes = page_size(page_bytes, granularity, granularity, str(self.device))
        self._handles: dict[int, Any] = {}  # page -> driver handle
        self._mapped: dict[int, int] = {}  # address -> page
        self._closed = False

    @property
    def mappings(self) -> int:
        """Mappings now in force: one for each mapped page."""
        return len(self._mapped)

    @property
    def created(self) -> int:
        """Physical pages that exist now."""
        return len(self._handles)

    def reserve(self, nbytes: int, *, readable_gaps: bool = False) -> int:
        if readable_gaps:
            raise ConfigError("on CUDA unmapped addresses cannot be made readable; use a layout without gaps")
        with self._current():
            return int(self._call("cuMemAddressReserve", nbytes, 0, 0, 0, nbytes=nbytes))

    def unreserve(self, address: int, nbytes: int) -> None:
        with self._current():
            self._call("cuMemAddressFree", address, nbytes)

    def create(self, pages: Sequence[int]) -> None:
        with self._current():
            try:
                self._create(pages)
            except CapacityError:  # torch's allocator keeps what was freed, for reuse
                give_back_cached()
                self._create(pages)

    def destroy(self, pages: Sequence[int]) -> None:
        with self._current():
            for done, page in enumerate(pages):
                try:
                    self._call("cuMemRelease", self._handles[page])
                except BaseException:
                    self._create(pages[:done])
                    raise
                del self._handles[page]

    def map(self, address: int, pages: Sequence[int], *, readable_gaps: bool = False) -> None:
        mapped: list[int] = []
        size = len(pages) * self.page_bytes
        with self._current():
            try:
                for at, page in zip(range(address, address + size, self.page_bytes), pages, strict=True):
                    self._call("cuMemMap", at, self.page_bytes, 0, self._handles[page], 0)
                    self._mapped[at] = page
                    mapped.append(at)
                if pages:
                    self._call("cuMemSetAccess", address, size, self._access, len(self._access), nbytes=size)
            except BaseException:
                for at in mapped:
                    self._unmap(at)
                raise

    def unmap(self, address: int, count: int, *, readable_gaps: bool = False) -> None:
        unmapped: list[int] = []
        with self._current():
            try:
                for i in range(count):
                    unmapped.append(self._unmap(address + i * self.page_bytes))
            except BaseException:
                self.map(address, unmapped)
                raise

    def shared_file(self) -> None:
        return None

    def export(self, page: int) -> int:
        """Return a file descriptor of a page's memory for another process; the caller closes it.

        Who adopts it keeps the memory from being given back. Raises `StateError` where the driver refuses.
        """
        with self._current():
            return int(self._call("cuMemExportToShareableHandle", self._handles[page], self._descriptors, 0))

    def adopt(self, page: int, descriptor: int) -> None:
        """Have memory that another process exported, of a page's size, be a page until `destroy` lets go of it.

        Pages are for this device alone from then on: what others reach of that memory is not known here.
        """
        with self._current():
            self._handles[page] = self._call("cuMemImportFromShareableHandle", descriptor, self._descriptors)
        self._access = [self._access_of(self.device.index)]

    def copy(self, address: int, source: int, nbytes: int) -> None:
        """Copy bytes between addresses that the device reaches, on this thread's stream of it, and wait for them.

        torch would copy on a stream of the device whose memory the source is, and make a context there for it.
        """
        stream = torch.cuda.current_stream(self.device)
        with self._current():
            self._call("cuMemcpyAsync", address, source, nbytes, stream.cuda_stream)
            self._call("cuStreamSynchronize", stream.cuda_stream)

    def close(self) -> None:
        if self._closed:
            return
        if self._mapped:  # nobody is left who knows what may still use it
            synchronize(self.device)
        for address in list(self._mapped):
            self.unmap(address, 1)
        self.destroy(list(self._handles))
        self._closed = True

    def _create(self, pages: Sequence[int]) -> None:
        made: dict[int, Any] = {}
        try:
            for page in pages:
                nbytes = len(pages) * self.page_bytes
                made[page] = self._call("cuMemCreate", self.page_bytes, self._properties, 0, nbytes=nbytes)
        except BaseException:
            for handle in made.values():
                self._call("cuMemRelease", handle)
            raise
        self._handles |= made

    def _unmap(self, address: int) -> int:
        """Unmap the page at an address, and return it."""
        self._call("cuMemUnmap", address, self.page_bytes)
        return self._mapped.pop(address)

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Have the device's context current on this thread, and then the caller's again."""
        before = self._call("cuCtxGetCurrent")
        if int(before):  # else nothing of this thread can be in a capture
            require_no_capture(f"pages of {self.device} cannot be made, mapped or given back")
        if int(before) == int(self._context):
            yield
            return
        self._call("cuCtxSetCurrent", self._context)
        try:
            yield
        finally:
            self._cu.cuCtxSetCurrent(before)

    def _location(self, index: int) -> Any:
        location = self._cu.CUmemLocation()
        location.type = self._cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = index
        return location

    def _access_of(self, index: int) -> Any:
        access = self._cu.CUmemAccessDesc()
        access.location = self._location(index)
        access.flags = self._cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access

    def _call(self, name: str, *args: Any, nbytes: int = 0) -> Any:
        """Call the driver; an error becomes an exception, `nbytes` is what it says was asked for."""
        code, *values = getattr(self._cu, name)(*args)
        if code == self._cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            free, total = torch.cuda.mem_get_info(self.device)
            message = f"{self.device} is out of memory in {name}; free some there, or give its places smaller budgets"
            raise CapacityError(message, requested_bytes=nbytes, free_bytes=free, total_bytes=total)
        if code != self._cu.CUresult.CUDA_SUCCESS:
            raise StateError(f"the CUDA driver refused {name} on {self.device}: {code}")
        return values[0] if values else None
