"""Where page tables wait: a mapping of a whole memory file, from which they move into ranges and back.

To fill a page table costs more than to copy what it shows (8 us for 64 KiB, and 5 to empty it); to move it costs a
system call for a whole stretch of pages. So pages that no range shows stay mapped here.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

_DONTUNMAP, _FIXED, _MAYMOVE = 4, 2, 1
_MOVE = _DONTUNMAP | _FIXED | _MAYMOVE
_POPULATE_READ = 22
_MOST_BYTES = 256 << 30
"""Of address space for one place. Pages above it are mapped anew each time."""
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class PageTableCache:
    """Page tables of pages that no range shows. Where the system refuses it (before Linux 5.13), there are none.

    Both addresses of a move show the same file before and after it (`MREMAP_DONTUNMAP`): none is ever free for others.
    """

    def __init__(self, file: int, page_bytes: int) -> None:
        self._file = file
        self._page_bytes = page_bytes
        self._pages = 0
        self._filled = bytearray()
        self._usable = True
        self._address: int | None = None
        self._beginning = threading.Lock()  # pages are created by several threads

    def fill(self, first: int, count: int) -> None:
        """Created pages are mapped here from now on."""
        with self._beginning:
            if self._usable and self._address is None:
                self._begin()
        if self._covers(first, count):
            done = not _libc.madvise(self._at(first), count * self._page_bytes, _POPULATE_READ)
            self._mark(first, count, done)

    def empty(self, first: int, count: int) -> None:
        """Pages are no more: the system has taken them out."""
        if self._covers(first, count):
            self._mark(first, count, False)

    def move_out(self, first: int, count: int, address: int) -> bool:
        """Show pages at an address; whether the system did."""
        if not self._covers(first, count) or not self._move(self._at(first), address, count):
            return False
        if self._filled.count(1, first, first + count) < count:
            _libc.madvise(address, count * self._page_bytes, _POPULATE_READ)
        self._mark(first, count, False)
        return True

    def move_in(self, address: int, first: int, count: int) -> None:
        """Pages that were shown at an address are here again; the address shows the file as before, unmapped or not."""
        if self._covers(first, count) and self._move(address, self._at(first), count):
            self._mark(first, count, True)

    def close(self) -> None:
        """Can be called twice."""
        with self._beginning:
            if self._address is not None:
                _libc.munmap(self._address, self._pages * self._page_bytes)
            self._usable, self._address = False, None

    def _begin(self) -> None:
        """Map all of the file that there can ever be, at the first use."""
        pages = min(os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE, _MOST_BYTES) // self._page_bytes
        read_write = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc.mmap(None, pages * self._page_bytes, read_write, mmap.MAP_SHARED, self._file, 0)
        self._usable = address != _FAILED
        if self._usable:
            self._address, self._pages = address, pages

    def _move(self, source: int, target: int, count: int) -> bool:
        size = count * self._page_bytes
        if _libc.mremap(source, size, size, _MOVE, target) == _FAILED:
            self._usable = False  # nor is it given back: what a refusal has left of it is not known
            self._address = None
        return self._usable

    def _covers(self, first: int, count: int) -> bool:
        return self._usable and self._address is not None and first + count <= self._pages

    def _at(self, page: int) -> int:
        assert self._address is not None
        return self._address + page * self._page_bytes

    def _mark(self, first: int, count: int, filled: bool) -> None:
        self._filled.extend(bytes(max(0, first + count - len(self._filled))))  # as long as the pages that there were
        self._filled[first : first + count] = bytes([filled]) * count
