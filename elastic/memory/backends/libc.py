"""The calls of the C library that memory files need; `ctypes.get_errno` tells why one failed."""

from __future__ import annotations

import ctypes
import mmap

FAILED = ctypes.c_void_p(-1).value
"""What `mmap` and `mremap` return when they are refused."""
NO_RESERVE = 0x4000
"""A flag of `mmap`: the system need not have memory for all of it."""

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.mremap.restype = ctypes.c_void_p
libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
libc.pread.restype = ctypes.c_ssize_t
libc.pread.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long]


def reserve(nbytes: int, alignment: int, protection: int = 0) -> int | None:
    """Reserve address space, at a multiple of `alignment`; None where the system refuses, as `get_errno` tells."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    spare = alignment - mmap.PAGESIZE
    start = libc.mmap(None, nbytes + spare, protection, flags, -1, 0)
    if start == FAILED:
        return None
    address = -(-start // alignment) * alignment
    for surplus, size in ((start, address - start), (address + nbytes, start + spare - address)):
        if size:
            libc.munmap(surplus, size)
    return int(address)
