"""Host memory as psutil sees it."""

from __future__ import annotations

from elastic.controller.snapshot import HostStats


def read_host() -> HostStats:
    """Read host memory in bytes; None for both where psutil is absent or fails: it raises what the system gives it."""
    try:
        import psutil

        memory = psutil.virtual_memory()
        return HostStats(int(memory.available), int(memory.total))
    except Exception:
        return HostStats()
