"""The pages of a place as a ledger counts them, without memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from elastic.errors import CapacityError, IntegrityError, Overloaded
from elastic.kvcache.storage.sector_cap import SectorCap

RETRY_AFTER_S = 5.0


class SimulatedMemory:
    """Sectors of one engine that are only counted: a `SectorMemory`, with the limits of `BlockMemory`.

    A sector has `sector_pages` in all layers that are here together; what `other_pages` has of `budget_pages`, weights
    above all, is not for it. `promised`, `reusable` and `give_up_reusable` are as of `BlockMemory`.
    """

    def __init__(
        self,
        budget_pages: int,
        other_pages: int,
        sector_pages: int,
        blocks_per_sector: int,
        *,
        promised: Callable[[], int] = lambda: 0,
        reusable: Callable[[], int] = lambda: 0,
        give_up_reusable: Callable[[int], object] = lambda sectors: None,
    ) -> None:
        self.lock: AbstractContextManager[Any] = nullcontext()
        self.budget_pages, self.other_pages, self.sector_pages = budget_pages, other_pages, sector_pages
        self.promised = promised
        self.cap = SectorCap()
        self._blocks_per_sector = blocks_per_sector
        self._reusable, self._give_up_reusable = reusable, give_up_reusable
        self.mapped: set[tuple[int, int]] = set()
        """The sectors that are in use, or kept for reuse: (group, sector)."""
        self._free: list[int] = []  # numbers that were in use before
        self._numbers = 0

    @property
    def sectors(self) -> int:
        """Sectors that there is memory for."""
        return max(0, (self.budget_pages - self.other_pages) // self.sector_pages)

    reusable_limit = sectors

    @property
    def capacity(self) -> int:
        """Sectors that requests could have, with none there."""
        return self.cap.within(self.sectors)

    @property
    def allocated(self) -> int:
        """Sectors that are in use, or kept for reuse."""
        return len(self.mapped)

    @property
    def used_sectors(self) -> int:
        """Sectors that live sequences need."""
        return self.allocated - self._reusable()

    @property
    def free_pages(self) -> int:
        """Pages that neither weights nor live sequences have, nor were promised to these."""
        sectors = self.used_sectors + self.promised()
        return self.budget_pages - self.other_pages - sectors * self.sector_pages

    def blocks_per_sector(self, group: int) -> int:
        """Count the blocks of a sector."""
        return self._blocks_per_sector

    def room(self, *, growing: bool) -> int:
        """Count the sectors that could be had: for sequences that live (`growing`), or for new ones."""
        most = self.cap.within(self.sectors, growing=growing)
        return max(0, most - self.used_sectors)

    def require_possible(self, sectors: int, what: str) -> None:
        """Raise `CapacityError` if so many are never to be had, `Overloaded` if not while the cap is as it is."""
        if sectors > self.sectors:
            raise CapacityError(
                f"{what} never fits", requested_bytes=sectors, free_bytes=self.room(growing=False), total_bytes=0
            )
        if sectors > self.cap.within(sectors):
            raise Overloaded(f"{what} does not fit while the cap is {self.cap.sectors}", retry_after_s=RETRY_AFTER_S)

    def allocate(self, group: int) -> int:
        """Return the number of one more sector. Raises `CapacityError`, and nothing has changed."""
        most = self.cap.within(self.sectors, growing=True)
        if self.allocated >= most:
            self._give_up_reusable(self.allocated + 1 - most)
        if self.allocated >= most:
            raise CapacityError(f"all {most} sectors are in use", requested_bytes=1, free_bytes=0, total_bytes=most)
        if not self._free:
            self._free.append(self._numbers)
            self._numbers += 1
        sector = self._free.pop()
        self.mapped.add((group, sector))
        return sector

    def free(self, group: int, sector: int) -> None:
        """Take a sector back."""
        self.mapped.remove((group, sector))
        self._free.append(sector)

    def set_cap(self, sectors: int | None) -> None:
        """Have so many sectors at the most; a lower one binds those that live once they need no more."""
        self.cap.set(sectors)
        self.reached_cap()

    def reached_cap(self) -> bool:
        """Return whether there are no more sectors than the cap allows, nor will be for what was promised."""
        cap = self.cap
        if cap.sectors is not None and cap.live != cap.sectors:
            self._give_up_reusable(self.allocated - cap.sectors)
            if max(self.allocated, self.used_sectors + self.promised()) <= cap.sectors:
                cap.live = cap.sectors
        return cap.live == cap.sectors

    def resize(
        self, *, other_pages: int | None = None, sector_pages: int | None = None, keeps_promises: bool = True
    ) -> None:
        """Have weights, or layers with keys and values, come or go. Raises `CapacityError` where live ones lack room.

        Nothing has changed then. Without `keeps_promises` what has sectors counts alone.
        """
        before = self.other_pages, self.sector_pages
        self.other_pages = self.other_pages if other_pages is None else other_pages
        self.sector_pages = self.sector_pages if sector_pages is None else sector_pages
        lacking = -self.free_pages - (0 if keeps_promises else self.promised() * self.sector_pages)
        if lacking > 0:
            self.other_pages, self.sector_pages = before
            raise CapacityError("no room", requested_bytes=lacking, free_bytes=0, total_bytes=self.budget_pages)
        self._give_up_reusable(self.allocated - self.sectors)

    def check(self) -> None:
        """Raise `IntegrityError` where more is allocated than there is."""
        if self.allocated > self.sectors:
            raise IntegrityError(f"{self.allocated} sectors are allocated of {self.sectors}")
