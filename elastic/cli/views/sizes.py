"""Sizes as text, for what prints without the package that draws tables too."""

from __future__ import annotations


def mib(nbytes: int) -> str:
    """Return bytes as text, in MiB."""
    return f"{nbytes / 2**20:.2f} MiB"
