"""Host memory."""

from __future__ import annotations

from elastic.controller.snapshot import Host


def read_host() -> Host:
    """As psutil sees it; nothing where psutil is absent or does not know."""
    try:
        import psutil

        memory = psutil.virtual_memory()
    except (ImportError, OSError, RuntimeError, NotImplementedError):
        return Host()
    return Host(int(memory.available), int(memory.total))
