"""Memory files that other processes of one host can read: by /proc, for as long as somebody holds them open.

Nothing is sent but a process id and the number of a descriptor, and nothing has a name: the memory goes when the last
process that holds it does. A process that opens a file can share it in turn, so what it holds outlives its maker.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from elastic.errors import StateError
from elastic.memory.backends.libc import libc
from elastic.types import SharedFile as SharedFile

_PIECE_BYTES = 1 << 20  # of one system call, so that no reader is in the kernel for long


@cache
def host_name() -> str:
    """Return a name of this host since it was started, and of the namespace that process ids here are of."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def share(descriptor: int) -> SharedFile:
    """Say where other processes find a file that this one holds open."""
    facts = os.fstat(descriptor)
    return SharedFile(host_name(), os.getpid(), descriptor, facts.st_ino, facts.st_size)


class OpenFile:
    """A memory file of another process, for reading. It is held until `close`, also when that process has ended.

    A `rank_memory.MemoryReader`: whoever wrote it goes on as it likes.
    """

    waits = False
    device = torch.device("cpu")
    descriptor = -1
    """`share` it: others find the file as long as this process holds it. -1: it is not open."""

    def __init__(self, file: SharedFile) -> None:
        """Open a file that a process of this host holds.

        Raises `StateError` where it cannot be: another host, an ended process, another user's, another file by now.
        """
        if file.host != host_name():
            raise StateError(
                f"the memory of process {file.pid} is on host {file.host}; only processes of that host can open it, "
                f"and this one is on {host_name()}"
            )
        path = f"/proc/{file.pid}/fd/{file.descriptor}"
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except PermissionError as error:
            raise StateError(
                f"{path} may not be read: run both processes as one user, and let them be traced"
            ) from error
        except OSError as error:
            raise StateError(
                f"{path} is gone ({error.strerror}): its process has ended, or closed its memory"
            ) from error
        if os.fstat(self.descriptor).st_ino != file.inode:
            self.close()
            raise StateError(
                f"{path} is another file by now: the process that shared it has closed its memory, or ended"
            )

    @property
    def nbytes(self) -> int:
        """Count the bytes of it now, holes included."""
        return os.fstat(self.descriptor).st_size

    def read(self, address: int, pieces: Sequence[tuple[int, int]]) -> None:
        """Copy pieces (offset, bytes) of the file side by side to an address; see `read_into`."""
        for offset, nbytes in pieces:
            self.read_into(address, offset, nbytes)
            address += nbytes

    def read_into(self, address: int, offset: int, nbytes: int) -> None:
        """Copy bytes of the file to an address, without the interpreter's lock. Raises `StateError` beyond its end."""
        done = 0
        while done < nbytes:
            count = libc.pread(self.descriptor, address + done, min(nbytes - done, _PIECE_BYTES), offset + done)
            if count > 0:
                done += count
            elif count == 0:
                raise StateError(f"a memory file has {self.nbytes:,} bytes; {offset:,} to {offset + nbytes:,} are not")
            elif (code := ctypes.get_errno()) != errno.EINTR:
                raise StateError(f"a memory file could not be read: {os.strerror(code)}")

    def close(self) -> None:
        """Let go of it. Can be called twice."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()
