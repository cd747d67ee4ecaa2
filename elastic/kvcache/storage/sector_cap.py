"""The most sectors that one engine may have: other places that have layers of it keep pages for these."""

from __future__ import annotations


class SectorCap:
    """A lower cap binds new requests. Those that live may get what they were promised, up to the cap of before."""

    def __init__(self) -> None:
        self.sectors: int | None = None
        """That new requests may bring; None: any number."""
        self._live: int | None = None  # for those that live: of before, until the present one is reached

    def set(self, sectors: int | None) -> None:
        """Have so many at the most. Call `reach` when those that live need no more."""
        self.sectors = sectors
        if sectors is None or (self._live is not None and sectors > self._live):
            self._live = sectors

    def reach(self) -> None:
        """Bind those that live, too."""
        self._live = self.sectors

    @property
    def reached(self) -> bool:
        """Whether those that live are bound by it."""
        return self._live == self.sectors

    def within(self, sectors: int, *, growing: bool = False) -> int:
        """Return so many sectors, or as many as there may be: with requests that live (`growing`), or with new ones."""
        most = self._live if growing else self.sectors
        return sectors if most is None else min(sectors, most)
