"""The contract between pages and a device: five calls in pairs. Each call happens whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from operator import sub
from typing import Protocol

import torch

from elastic.errors import ConfigError
from elastic.memory.backends.shared_file import SharedFile


class PageBackend(Protocol):
    """Physical pages and address space of one place.

    Page ids are chosen by the caller, from 0 up. A failure raises `CapacityError` (no memory) or `StateError` (a
    refused call) and leaves everything as it was.
    """

    device: torch.device
    page_bytes: int
    pages_per_huge_page: int
    """So many pages, from a multiple of it on, are a huge page of the system if they are created together, and shown as
    one where they are mapped together, a multiple of it behind the begin of a range. 1: pages lie in none."""

    @property
    def mappings(self) -> int:
        """Contiguous mappings now in force."""

    @property
    def created(self) -> int:
        """Physical pages that exist now."""

    def reserve(self, nbytes: int, *, readable_gaps: bool = False) -> int:
        """Reserve address space of a whole number of pages; returns its address.

        Unmapped parts fault when touched, or read as zero with `readable_gaps` (CPU only).
        """

    def unreserve(self, address: int, nbytes: int) -> None:
        """Give address space back; nothing may be mapped in it."""

    def create(self, pages: Sequence[int]) -> None:
        """Make physical memory for these pages."""

    def destroy(self, pages: Sequence[int]) -> None:
        """Give the memory of these pages back to the system; none may be mapped."""

    def map(self, address: int, pages: Sequence[int], *, readable_gaps: bool = False) -> None:
        """Show created pages one after another from `address` on, readable and writable."""

    def unmap(self, address: int, count: int, *, readable_gaps: bool = False) -> None:
        """Take `count` mapped pages out of the address space from `address` on. The pages keep their contents.

        `readable_gaps` is that of the reservation: it says what the addresses do afterwards.
        """

    def shared_file(self) -> SharedFile | None:
        """Say where other processes of the host can read these pages; page i lies at i * page_bytes.

        None: they cannot. Memory of a GPU is in no file.
        """

    def close(self) -> None:
        """Release everything. Can be called twice."""


def runs(pages: Sequence[int]) -> list[tuple[int, int]]:
    """Group consecutive ids as (first, count), in the given order: `[4, 5, 6, 9] -> [(4, 3), (9, 1)]`."""
    if not pages:
        return []
    if list(map(sub, pages[1:], pages)).count(1) == len(pages) - 1:
        return [(pages[0], len(pages))]
    starts = [i for i, page in enumerate(pages) if not i or page != pages[i - 1] + 1]
    stops = [*starts[1:], len(pages)]
    return [(pages[start], stop - start) for start, stop in zip(starts, stops, strict=True)]


def page_size(wanted: int | None, default: int, unit: int, where: str) -> int:
    """Return the bytes of a page. Raises `ConfigError` for what is no multiple of those that a device can show."""
    nbytes = default if wanted is None else wanted
    if nbytes < 1 or nbytes % unit:
        above = (max(0, nbytes) // unit + 1) * unit
        raise ConfigError(
            f"page_bytes={nbytes} must be a multiple of {unit} on {where}; give {above}, or None, which is {default}"
        )
    return nbytes
