"""Where Elastic keeps what it measured and compiled on a machine, and how a file there is replaced."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from elastic.errors import ConfigError, require_path

CACHE = "ELASTIC_CACHE"


def cache_directory() -> Path:
    """Return the directory that `ELASTIC_CACHE` names, else the user's. It need not exist.

    Raises `ConfigError` where that is in a home that there is not.
    """
    named = os.environ.get(CACHE)
    if named:
        return require_path(named, CACHE)
    try:
        return Path.home() / ".cache" / "elastic"
    except RuntimeError as error:
        raise ConfigError(f"{error}; set {CACHE} to a directory that can be written") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Replace a file in one step by what the block writes to the path that it gets; where that fails, it stays."""
    partial = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
