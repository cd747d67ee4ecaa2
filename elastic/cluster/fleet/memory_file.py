"""The memory of a rank's KV cache, held open by the fleet, so that it outlives the rank."""

from __future__ import annotations

import logging
import os
import select
import threading
from contextlib import suppress
from dataclasses import replace

from elastic.engines.core.kv_state import KVSource

logger = logging.getLogger(__name__)


class HeldMemory:
    """A rank's memory file and the end of its process. Thread-safe; `close` gives the memory back to the system."""

    def __init__(self, memory: KVSource, pid: int) -> None:
        """Open them. Raises `OSError` where that cannot be: another host, another user, or it has ended."""
        self._lock = threading.Lock()
        self._users = 1
        self._exit = os.pidfd_open(pid) if pid != os.getpid() else None
        try:
            file = memory.file
            self._file = os.open(f"/proc/{file.pid}/fd/{file.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._close_exit()
            raise
        self.source = replace(memory, file=replace(memory.file, pid=os.getpid(), descriptor=self._file))
        """Where others of the host can read it, also when the rank has ended."""
        if os.fstat(self._file).st_ino != memory.file.inode:
            self.close()
            raise OSError(f"descriptor {file.descriptor} of process {file.pid} is another file by now")

    def process_ended(self, timeout_s: float) -> bool:
        """Return whether nothing can write there any more, after waiting for at most so long."""
        if self._exit is None:
            return False
        poll = select.poll()
        poll.register(self._exit, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def hold(self) -> HeldMemory:
        """Have it stay open for one more `close`."""
        with self._lock:
            self._users += 1
        return self

    def close(self) -> None:
        """Close it, when everybody has."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
        os.close(self._file)
        self._close_exit()

    def _close_exit(self) -> None:
        if self._exit is not None:
            os.close(self._exit)


def hold_memory(memory: KVSource | None, pid: int) -> HeldMemory | None:
    """Hold a rank's memory open; None where that cannot be, so that what it holds is lost with it."""
    if memory is None:
        return None
    with suppress(OSError):
        return HeldMemory(memory, pid)
    logger.info("the memory of process %d cannot be read from here", pid)
    return None
