"""Host memory as psutil sees it."""

from __future__ import annotations

from elastic.controller.snapshot import HostStats


def read_host() -> HostStats:
    """Read host memory in bytes; None for both where psutil is absent or does not know."""
    try:
        import psutil

        memory = psutil.virtual_memory()
    except (ImportError, OSError, RuntimeError, NotImplementedError):
        return HostStats()
    return HostStats(int(memory.available), int(memory.total))
