"""Pages on a Linux CPU: a memory file mapped piece by piece into reserved address space.

A page is a slice of the file. `fallocate` makes it, so that a shortage is an error here and no SIGBUS later; punching
a hole gives it back to the kernel. Pages are shared mappings: a forked child must not touch them (`memory/places.py`
sees to that, and every release checks the process id).

Where the system makes huge pages, of 2 MiB, pages of that size and multiples consist of such, and smaller ones lie in
one if they are created together: in a third of the time, shown in a tenth of it, and given back in a sixtieth.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from elastic.errors import BackendUnavailable, CapacityError, StateError
from elastic.memory.backends.base import page_size, runs
from elastic.memory.backends.libc import FAILED, NO_RESERVE, libc, reserve
from elastic.memory.backends.mapping_quota import AddressSpace, MappingQuota
from elastic.memory.backends.page_table_cache import PageTableCache
from elastic.memory.backends.shared_file import SharedFile, share

DEFAULT_PAGE_BYTES = 64 * 1024
_MAP_FIXED, _MAP_POPULATE = 0x10, 0x8000
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
_MAPPED = mmap.MAP_SHARED | _MAP_FIXED | _MAP_POPULATE
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MOST_NAME = 249
"""Characters that the name of a memory file may have; it is for people alone."""
_ALLOCATE, _PUNCH_HOLE = 0, 1 | 2  # modes of fallocate; a hole leaves the file as long as it was


class MemfdBackend:
    """`PageBackend` on memfd and mmap. `quota` bounds mappings; None: that of the process."""

    def __init__(
        self, page_bytes: int | None = None, *, name: str = "elastic", quota: MappingQuota | None = None
    ) -> None:
        self.device = torch.device("cpu")
        self.page_bytes = page_size(page_bytes, DEFAULT_PAGE_BYTES, mmap.PAGESIZE, f"place {name}")
        if not hasattr(os, "memfd_create"):
            raise BackendUnavailable("CPU pages need Linux (memfd_create); on this system only CUDA places can be used")
        self.mappings = 0
        self.created = 0
        self._file = os.memfd_create(name[:_MOST_NAME], os.MFD_CLOEXEC)
        self._file_bytes = 0
        self._sizes = threading.Lock()  # pages are created by several threads, each of which may lengthen the file
        self._pid = os.getpid()
        self._space = AddressSpace(self.page_bytes, quota)
        self._huge_bytes = huge_page_bytes(self.page_bytes)
        self.pages_per_huge_page = max(1, self._huge_bytes // self.page_bytes)
        self._page_tables = PageTableCache(self._file, self.page_bytes, self._huge_bytes)

    def reserve(self, nbytes: int, *, readable_gaps: bool = False) -> int:
        protection = mmap.PROT_READ if readable_gaps else 0
        address = reserve(nbytes, self._huge_bytes if nbytes >= self._huge_bytes > 0 else mmap.PAGESIZE, protection)
        if address is None:
            raise self._failure("reserve address space", nbytes)
        try:
            self._space.reserve(address, nbytes)
        except CapacityError:
            libc.munmap(address, nbytes)
            raise
        return address

    def unreserve(self, address: int, nbytes: int) -> None:
        if libc.munmap(address, nbytes):
            raise self._failure("give back address space", nbytes)
        self._space.unreserve(address)

    def create(self, pages: Sequence[int]) -> None:
        with self._sizes:
            nbytes = (max(pages, default=-1) + 1) * self.page_bytes
            if nbytes > self._file_bytes:
                try:
                    os.ftruncate(self._file, nbytes)
                except OSError as error:
                    raise self._failure("create pages", nbytes, error.errno) from error
                self._file_bytes = nbytes
        for first, count in self._fallocate(_ALLOCATE, pages, "create pages"):
            self._page_tables.fill(first, count)
        with self._sizes:
            self.created += len(pages)

    def destroy(self, pages: Sequence[int]) -> None:
        for first, count in self._fallocate(_PUNCH_HOLE, pages, "give pages back"):
            self._page_tables.empty(first, count)
        with self._sizes:
            self.created -= len(pages)

    def map(self, address: int, pages: Sequence[int], *, readable_gaps: bool = False) -> None:
        pieces = runs(pages)
        remap = self._space.plan_map(address, pieces)
        end = address
        for first, count in pieces:
            size = count * self.page_bytes
            moved = self._page_tables.move_out(first, count, end)
            if not moved and libc.mmap(end, size, _READ_WRITE, _MAPPED, self._file, first * self.page_bytes) == FAILED:
                error = self._failure("map pages", size)
                self._hide(address, end - address, readable_gaps)
                self._space.quota.undo(remap.added)
                raise error
            end += size
        self.mappings += self._space.apply(remap)

    def unmap(self, address: int, count: int, *, readable_gaps: bool = False) -> None:
        if not count:
            return
        size = count * self.page_bytes
        remap = self._space.plan_unmap(address, size)
        for mapped in self._space.range_at(address).mapped(address, address + size):
            self._page_tables.move_in(*mapped)
        if not self._hide(address, size, readable_gaps):
            self._space.quota.undo(remap.added)
            raise self._failure("unmap pages", size)
        self.mappings += self._space.apply(remap)

    def shared_file(self) -> SharedFile | None:
        return share(self._file) if self._file >= 0 else None

    def close(self) -> None:
        self._page_tables.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _hide(self, address: int, size: int, readable_gaps: bool) -> bool:
        """Have reserved addresses show nothing; return whether the system did so."""
        if not size:
            return True
        protection = mmap.PROT_READ if readable_gaps else 0
        return bool(libc.mmap(address, size, protection, _RESERVED | _MAP_FIXED, -1, 0) != FAILED)

    def _fallocate(self, mode: int, pages: Sequence[int], what: str) -> list[tuple[int, int]]:
        """Make or unmake these pages of the file, all or none; return them as runs of (first, count)."""
        pieces = runs(sorted(pages))
        for done, (first, count) in enumerate(pieces):
            if mode == _ALLOCATE and self._huge_bytes:
                self._page_tables.make_huge(first, count)
            if self._refuses(mode, first, count):
                error = self._failure(what, count * self.page_bytes)
                for undone in pieces[: done + (mode == _ALLOCATE)]:
                    self._refuses(_PUNCH_HOLE if mode == _ALLOCATE else _ALLOCATE, *undone)
                raise error
        return pieces

    def _refuses(self, mode: int, first: int, count: int) -> bool:
        """Call `fallocate` until no signal interrupts it; return whether the system refused it."""
        if os.getpid() != self._pid:
            raise StateError("these pages belong to the parent process; wrap the model in the child instead")
        while libc.fallocate(self._file, mode, first * self.page_bytes, count * self.page_bytes):
            if ctypes.get_errno() != errno.EINTR:
                return True
        return False

    def _failure(self, what: str, nbytes: int, code: int | None = None) -> Exception:
        """Make the error of a call that was refused; `code` is why, None: `get_errno` tells."""
        code = code or ctypes.get_errno()
        if code in (errno.ENOMEM, errno.ENOSPC, errno.EFBIG):  # the last one: above a bound on files (`ulimit -f`)
            total = self.created * self.page_bytes
            message = f"the system refused to {what}: {os.strerror(code)}"
            return CapacityError(message, requested_bytes=nbytes, free_bytes=0, total_bytes=total)
        return StateError(f"could not {what} ({nbytes:,} bytes): {os.strerror(code)}")


@cache
def huge_page_bytes(page_bytes: int) -> int:
    """Return the bytes of a huge page of this system, if pages of this size consist of such or lie in one; else 0."""
    try:
        nbytes = int(Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text())
    except OSError:  # a system without them
        return 0
    return 0 if page_bytes % nbytes and nbytes % page_bytes else nbytes
