"""The memory of a rank's KV cache, held open by the fleet, so that it outlives the rank."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

from elastic.engines.core.kv_state import KVSource
from elastic.errors import StateError
from elastic.memory.backends.shared_file import OpenFile, share
from elastic.memory.pages.background import janitor

logger = logging.getLogger(__name__)


class HeldMemory:
    """A rank's memory file. It is open until everybody who holds it has closed it. Thread-safe."""

    def __init__(self, memory: KVSource) -> None:
        """Open it. Raises `StateError` where that cannot be."""
        if memory.file is None:
            raise StateError("the KV cache is in no file")
        janitor.start()
        self._lock = threading.Lock()
        self._users = 1
        self._file = OpenFile(memory.file)
        self.source = replace(memory, file=share(self._file.descriptor), memory=None)
        """Where others of the host can read it, also when the rank has ended."""

    def hold(self) -> HeldMemory:
        """Have it stay open for one more `close`."""
        with self._lock:
            self._users += 1
        return self

    def close(self) -> None:
        """Close it, when everybody has."""
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:  # the system frees its pages there, whole caches: nobody waits for that
            janitor.submit(self._file.close)


def hold_memory(rank: str, memory: KVSource | None) -> HeldMemory | None:
    """Hold a rank's memory open; None where that cannot be: what it holds is lost with it then."""
    if memory is None:
        return None
    try:
        return HeldMemory(memory)
    except StateError as error:
        logger.info("what rank %s has computed is lost if it is: %s", rank, error)
        return None
