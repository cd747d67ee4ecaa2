"""Pages on a Linux CPU: a memory file mapped piece by piece into reserved address space.

A page is a slice of the file. `fallocate` makes it, so that a shortage is an error here and no SIGBUS later; punching
a hole gives it back to the kernel. Pages are shared mappings: a forked child must not touch them (`memory/places.py`
sees to that, and every release checks the process id).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Sequence

import torch

from elastic.errors import BackendUnavailable, CapacityError, ConfigError, StateError
from elastic.memory.backends.base import runs
from elastic.memory.backends.mapping_quota import AddressSpace, MappingQuota
from elastic.memory.backends.page_table_cache import PageTableCache

DEFAULT_PAGE_BYTES = 64 * 1024
_MAP_FIXED, _MAP_NORESERVE, _MAP_POPULATE = 0x10, 0x4000, 0x8000
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_MAPPED = mmap.MAP_SHARED | _MAP_FIXED | _MAP_POPULATE
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


class MemfdBackend:
    """`PageBackend` on memfd and mmap. `quota` bounds mappings; None: that of the process."""

    def __init__(
        self, page_bytes: int | None = None, *, name: str = "elastic", quota: MappingQuota | None = None
    ) -> None:
        self.device = torch.device("cpu")
        self.page_bytes = page_bytes or DEFAULT_PAGE_BYTES
        if self.page_bytes % mmap.PAGESIZE:
            raise ConfigError(f"page_bytes={self.page_bytes} must be a multiple of {mmap.PAGESIZE}")
        if not hasattr(os, "memfd_create"):
            raise BackendUnavailable("CPU pages need Linux (memfd_create); on this system only CUDA places can be used")
        self._file = os.memfd_create(name, os.MFD_CLOEXEC)
        self._file_bytes = 0
        self._sizes = threading.Lock()  # pages are created by several threads, each of which may lengthen the file
        self._pid = os.getpid()
        self._created = 0
        self._space = AddressSpace(self.page_bytes, quota)
        self._parking = PageTableCache(self._file, self.page_bytes)

    @property
    def mappings(self) -> int:
        return self._space.mapped

    @property
    def created(self) -> int:
        return self._created

    def reserve(self, nbytes: int, *, readable_gaps: bool = False) -> int:
        protection = mmap.PROT_READ if readable_gaps else 0
        address = _libc.mmap(None, nbytes, protection, _RESERVED, -1, 0)
        if address == _FAILED:
            raise self._failed("reserve address space", nbytes)
        try:
            self._space.reserve(address, nbytes)
        except CapacityError:
            _libc.munmap(address, nbytes)
            raise
        return int(address)

    def unreserve(self, address: int, nbytes: int) -> None:
        if _libc.munmap(address, nbytes):
            raise self._failed("give back address space", nbytes)
        self._space.unreserve(address)

    def create(self, pages: Sequence[int]) -> None:
        self._grow_file(max(pages, default=-1) + 1)
        done: list[tuple[int, int]] = []
        for first, count in runs(sorted(pages)):
            if self._fallocate(0, first, count):
                error = self._failed("create pages", count * self.page_bytes)
                for undo in done:
                    self._fallocate(_KEEP_SIZE | _PUNCH_HOLE, *undo)
                raise error
            done.append((first, count))
        for first, count in done:
            self._parking.fill(first, count)
        with self._sizes:
            self._created += len(pages)

    def destroy(self, pages: Sequence[int]) -> None:
        done: list[tuple[int, int]] = []
        for first, count in runs(sorted(pages)):
            if self._fallocate(_KEEP_SIZE | _PUNCH_HOLE, first, count):
                error = self._failed("give pages back", count * self.page_bytes)
                for undo in done:
                    self._fallocate(0, *undo)
                raise error
            done.append((first, count))
        for first, count in done:
            self._parking.empty(first, count)
        with self._sizes:
            self._created -= len(pages)

    def map(self, address: int, pages: Sequence[int], *, readable_gaps: bool = False) -> None:
        pieces = runs(pages)
        cut = self._space.map(address, pieces)
        at = address
        for first, count in pieces:
            size = count * self.page_bytes
            if not self._show(at, first, count):
                error = self._failed("map pages", size)
                self._hide(address, at - address, readable_gaps)
                self._space.drop(cut)
                raise error
            at += size
        self._space.make(cut)

    def unmap(self, address: int, count: int, *, readable_gaps: bool = False) -> None:
        if not count:
            return
        size = count * self.page_bytes
        cut = self._space.unmap(address, size)
        for shown in self._space.shown(address, size):
            self._parking.move_in(*shown)
        if not self._hide(address, size, readable_gaps):
            self._space.drop(cut)
            raise self._failed("unmap pages", size)
        self._space.make(cut)

    def close(self) -> None:
        self._parking.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _show(self, address: int, first: int, count: int) -> bool:
        if self._parking.move_out(first, count, address):
            return True
        size = count * self.page_bytes
        return bool(_libc.mmap(address, size, _READ_WRITE, _MAPPED, self._file, first * self.page_bytes) != _FAILED)

    def _hide(self, address: int, size: int, readable_gaps: bool) -> bool:
        """Have reserved addresses show nothing."""
        if not size:
            return True
        protection = mmap.PROT_READ if readable_gaps else 0
        return bool(_libc.mmap(address, size, protection, _RESERVED | _MAP_FIXED, -1, 0) != _FAILED)

    def _grow_file(self, pages: int) -> None:
        with self._sizes:
            if pages * self.page_bytes > self._file_bytes:
                os.ftruncate(self._file, pages * self.page_bytes)
                self._file_bytes = pages * self.page_bytes

    def _fallocate(self, mode: int, first: int, count: int) -> int:
        if os.getpid() != self._pid:
            raise StateError("these pages belong to the parent process; wrap the model in the child instead")
        while True:
            refused = _libc.fallocate(self._file, mode, first * self.page_bytes, count * self.page_bytes)
            if not refused or ctypes.get_errno() != errno.EINTR:
                return int(refused)

    def _failed(self, what: str, nbytes: int) -> Exception:
        code = ctypes.get_errno()
        if code in (errno.ENOMEM, errno.ENOSPC):
            total = self._created * self.page_bytes
            message = f"the system refused to {what}: {os.strerror(code)}"
            return CapacityError(message, requested_bytes=nbytes, free_bytes=0, total_bytes=total)
        return StateError(f"could not {what} ({nbytes:,} bytes): {os.strerror(code)}")
