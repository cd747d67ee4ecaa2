"""Sizes and layers as text, for what prints without the package that draws tables too."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.memory.backends.base import runs


def mib(nbytes: int) -> str:
    """Return bytes as text, in MiB."""
    return f"{nbytes / 2**20:.2f} MiB"


def ranges(indices: Sequence[int]) -> str:
    """Return ascending indices as text, such as `0-7, 12`."""
    return ", ".join(str(first) if n == 1 else f"{first}-{first + n - 1}" for first, n in runs(indices))
