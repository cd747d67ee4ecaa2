"""Page tables kept for reuse: a mapping of a whole memory file, from which they move into ranges and back.

To fill a page table costs more than to copy what it shows (8 us for 64 KiB, and 5 to empty it); to move it costs a
system call for any number of consecutive pages. So pages that no range shows stay mapped here. Those that consist of
huge pages are made here, too: the system makes them where they are mapped.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading

from elastic.memory.backends.libc import FAILED, libc, reserve

_DONTUNMAP, _FIXED, _MAYMOVE = 4, 2, 1
_MOVE = _DONTUNMAP | _FIXED | _MAYMOVE
_MAP_FIXED = 0x10
_POPULATE_READ, _COLLAPSE = 22, 25
_MOST_BYTES = 256 << 30
"""Of address space for one place. Pages above it are mapped anew each time."""


class PageTableCache:
    """Page tables of pages that no range shows. Where the system refuses it (before Linux 5.13), there are none.

    Both addresses of a move show the same file before and after it (`MREMAP_DONTUNMAP`): none is ever free for others.
    """

    def __init__(self, file: int, page_bytes: int, huge_bytes: int = 0) -> None:
        self._file = file
        self._page_bytes = page_bytes
        self._huge_bytes = huge_bytes
        self._pages = 0  # those that the mapping covers; 0 before it is made, and where it cannot be used
        self._address = 0
        self._usable = True
        self._filled = bytearray()
        self._pages_per_huge_page = huge_bytes // page_bytes  # 0: pages consist of whole huge pages, or there are none
        self._huge: set[int] = set()
        """Huge pages, by number, that the system shows by one entry, wherever it does."""
        self._making = threading.Lock()  # pages are created by several threads

    def make_huge(self, first: int, count: int) -> None:
        """Create the huge pages that lie in these pages, as far as the system has any (Linux 6.1): 0.4 ms for 2 MiB.

        Filling them by small ones takes thrice as long, and mapping them ten times. A huge page is made of one that has
        at least one small page.
        """
        self._map_file()
        if not self._huge_bytes or first + count > self._pages:
            return
        size, stop = self._huge_bytes, (first + count) * self._page_bytes
        for offset in range(-(-first * self._page_bytes // size) * size, stop - size + 1, size):
            libc.fallocate(self._file, 0, offset, mmap.PAGESIZE)
            if libc.madvise(self._address + offset, size, _COLLAPSE):
                if ctypes.get_errno() == errno.EINVAL:
                    self._huge_bytes = 0  # this system makes none
                return  # it has no more now, and looks for some each time
            if self._pages_per_huge_page:
                self._huge.add(offset // size)

    def fill(self, first: int, count: int) -> None:
        """Map created pages here from now on."""
        self._map_file()
        if first + count <= self._pages:
            address = self._address + first * self._page_bytes
            self._mark(first, count, not libc.madvise(address, count * self._page_bytes, _POPULATE_READ))

    def empty(self, first: int, count: int) -> None:
        """Forget pages that exist no more: the system has taken them out."""
        if first + count <= self._pages:
            self._mark(first, count, False)
            self._split(first, count)
            self._huge.difference_update(self._huge_pages_of(first, count))

    def move_out(self, first: int, count: int, address: int) -> bool:
        """Show pages at an address; return whether the system did so."""
        self._split(first, count, address)
        if not self._move(first, count, address, inwards=False):
            return False
        if self._filled.count(1, first, first + count) < count:
            libc.madvise(address, count * self._page_bytes, _POPULATE_READ)
        self._mark(first, count, False)
        return True

    def move_in(self, address: int, first: int, count: int) -> None:
        """Take pages back from an address, which shows the file as before, whether the system moved them or not."""
        split = self._split(first, count, address)
        if self._move(first, count, address, inwards=True):
            self._mark(first, count, True)
            for huge_page in split:
                self._mark(huge_page * self._pages_per_huge_page, self._pages_per_huge_page, False)

    def close(self) -> None:
        """Give the mapping back. Can be called twice."""
        with self._making:
            if self._pages:
                libc.munmap(self._address, self._pages * self._page_bytes)
            self._usable, self._pages = False, 0

    def _map_file(self) -> None:
        """Map all of the file that there can ever be, the first time."""
        with self._making:
            if not self._usable or self._pages:
                return
            pages = min(os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE, _MOST_BYTES) // self._page_bytes
            size, read_write = pages * self._page_bytes, mmap.PROT_READ | mmap.PROT_WRITE
            address = reserve(size, self._huge_bytes or mmap.PAGESIZE)
            if address and libc.mmap(address, size, read_write, mmap.MAP_SHARED | _MAP_FIXED, self._file, 0) != FAILED:
                self._address, self._pages = address, pages
            else:
                self._usable = False

    def _huge_pages_of(self, first: int, count: int) -> range:
        """Return the huge pages that have some of these pages; none where pages lie in none."""
        size = self._pages_per_huge_page
        return range(first // size, (first + count - 1) // size + 1) if size else range(0)

    def _split(self, first: int, count: int, address: int | None = None) -> list[int]:
        """Note which huge pages the system shows as such no more: it moves no part of an entry, nor one to any address.

        It forgets the entry then, and fills no page table instead.
        """
        size, huge = self._pages_per_huge_page, self._huge_bytes
        whole = address is None or (huge and (address - self._address - first * self._page_bytes) % huge == 0)
        split = [
            huge_page
            for huge_page in self._huge.intersection(self._huge_pages_of(first, count))
            if not (whole and first <= huge_page * size and (huge_page + 1) * size <= first + count)
        ]
        for huge_page in split:
            self._huge.discard(huge_page)
            self._mark(huge_page * size, size, False)
        return split

    def _move(self, first: int, count: int, address: int, *, inwards: bool) -> bool:
        if first + count > self._pages:
            return False
        size, cached = count * self._page_bytes, self._address + first * self._page_bytes
        source, target = (address, cached) if inwards else (cached, address)
        if libc.mremap(source, size, size, _MOVE, target) == FAILED:
            self._usable, self._pages = False, 0  # nor is it given back: what a refusal has left of it is not known
        return self._usable

    def _mark(self, first: int, count: int, filled: bool) -> None:
        self._filled.extend(bytes(max(0, first + count - len(self._filled))))  # as long as the pages that there were
        self._filled[first : first + count] = bytes([filled]) * count
