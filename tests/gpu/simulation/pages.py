"""Pages of a GPU by hand, through the driver's calls."""

from __future__ import annotations

from typing import Any

import torch

try:
    from cuda.bindings import driver
except ImportError:  # where no test marked cuda runs
    driver: Any = None  # type: ignore[no-redef]

PAGE = 2 << 20


class Pages:
    """Reservations, memory and mappings of device 0; `close` gives up what is left."""

    def __init__(self) -> None:
        torch.ones(1, device="cuda:0")  # makes a context
        self.reservations: dict[int, int] = {}
        self.handles: list[Any] = []
        self.mapped: dict[int, int] = {}

    def reserve(self, pages: int = 4) -> int:
        address = int(done(driver.cuMemAddressReserve(pages * PAGE, 0, 0, 0)))
        self.reservations[address] = pages * PAGE
        return address

    def create(self, device: int = 0, *, shareable: bool = False) -> Any:
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = location(device)
        if shareable:
            properties.requestedHandleTypes = descriptors()
        self.handles.append(done(driver.cuMemCreate(PAGE, properties, 0)))
        return self.handles[-1]

    def adopt(self, descriptor: int) -> Any:
        """Import memory; return its handle."""
        self.handles.append(done(driver.cuMemImportFromShareableHandle(descriptor, descriptors())))
        return self.handles[-1]

    def release(self, handle: Any) -> None:
        self.handles.remove(handle)
        done(driver.cuMemRelease(handle))

    def map(self, address: int, handle: Any) -> None:
        done(driver.cuMemMap(address, PAGE, 0, handle, 0))
        self.mapped[address] = PAGE

    def grant(self, address: int, size: int = PAGE, device: int = 0) -> None:
        access = driver.CUmemAccessDesc()
        access.location = location(device)
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        done(driver.cuMemSetAccess(address, size, [access], 1))

    def unmap(self, address: int) -> None:
        done(driver.cuMemUnmap(address, PAGE))
        del self.mapped[address]

    def tensor(self, owner: int = 0, reader: int | None = 0) -> torch.Tensor:
        """A page of `owner` that `reader` may touch, float32 [PAGE / 4], on device 0."""
        address = self.reserve(1)
        self.map(address, self.create(owner))
        if reader is not None:
            self.grant(address, device=reader)
        return at(address)

    def close(self) -> None:
        torch.cuda.synchronize()
        for address in list(self.mapped):
            self.unmap(address)
        for handle in list(self.handles):
            self.release(handle)
        for address, size in self.reservations.items():
            done(driver.cuMemAddressFree(address, size))


def descriptors() -> Any:
    """The kind of handle that is a file descriptor."""
    return driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def location(device: int) -> Any:
    found = driver.CUmemLocation()
    found.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    found.id = device
    return found


def done(result: tuple[Any, ...]) -> Any:
    """Return the value of a call of the driver; an error is raised by its name."""
    code, *values = result
    if code != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(driver.CUresult(code).name)
    return values[0] if values else None


def at(address: int, elements: int = PAGE // 4) -> torch.Tensor:
    """The memory of device 0 at an address as float32 [elements]."""

    class Array:
        __cuda_array_interface__ = {"shape": (elements,), "typestr": "<f4", "data": (address, False), "version": 3}

    return torch.as_tensor(Array(), device="cuda:0")
