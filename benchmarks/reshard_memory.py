"""Memory of a CPU, or of a GPU, whose pages can be given back and come back."""

from __future__ import annotations

import itertools
import mmap
from typing import Protocol

import torch

from elastic.config import Place
from elastic.memory.pages.page_pool import PagePool
from elastic.memory.pages.virtual_range import VirtualRange
from elastic.memory.places import make_backend

PAGE = 64 << 10
_numbers = itertools.count()


class Memory(Protocol):
    """Pages at addresses that stay."""

    floats: torch.Tensor
    """All of it; not to be touched while pages are given back."""

    def give_back(self) -> None:
        """Unmap its pages."""

    def come_back(self) -> None:
        """Have pages where there are none."""

    def fill(self) -> None:
        """Have all pages, and write to them."""

    def close(self) -> None: ...


def memory(device: str, nbytes: int) -> Memory:
    """Return so many bytes of a device, at least, all of them written."""
    made = CPUMemory(nbytes) if device == "cpu" else GPUMemory(device, nbytes)
    made.fill()
    return made


class CPUMemory:
    """Anonymous memory."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, -(-nbytes // PAGE) * PAGE)
        self.floats = torch.frombuffer(self._map, dtype=torch.float32)

    def give_back(self) -> None:
        self._map.madvise(mmap.MADV_DONTNEED)

    def come_back(self) -> None:
        """Do nothing: pages come as they are touched."""

    def fill(self) -> None:
        self.floats.fill_(1.0)

    def close(self) -> None:
        del self.floats
        self._map.close()


class GPUMemory:
    """Memory mapped by the driver. Pages that are given back are mapped nowhere, and kept for whoever needs some."""

    def __init__(self, device: str, nbytes: int) -> None:
        backend = make_backend(Place.parse(device))
        self._count = -(-nbytes // backend.page_bytes)
        name = f"{device}#memory-{next(_numbers)}"
        self._pool = PagePool(name, backend, self._count * backend.page_bytes, ready_pages=0)
        self._range = VirtualRange(self._pool, self._count)
        self.come_back()
        storage = self._range.storage(0, self._count * backend.page_bytes, lambda: None)
        self.floats = storage.tensor(torch.float32)

    def give_back(self) -> None:
        if self._range.slots:
            torch.cuda.synchronize(self._pool.device)
            self._pool.free(self._range.unmap(0, self._count))

    def come_back(self) -> None:
        if not self._range.slots:
            self._range.map(0, self._pool.allocate("kv", self._count))

    def fill(self) -> None:
        self.come_back()
        self.floats.fill_(1.0)

    def close(self) -> None:
        torch.cuda.synchronize(self._pool.device)
        del self.floats
        self._range.close()
        self._pool.close()
