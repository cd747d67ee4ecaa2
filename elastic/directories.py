"""Where Elastic keeps what it measured and compiled on a machine."""

from __future__ import annotations

import os
from pathlib import Path

CACHE = "ELASTIC_CACHE"


def cache_directory() -> Path:
    """Return the directory that `ELASTIC_CACHE` names, else the user's. It need not exist."""
    return Path(os.environ.get(CACHE) or Path.home() / ".cache" / "elastic")
