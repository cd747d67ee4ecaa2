"""The most sectors that one engine may have: other places that have layers of it keep pages for these."""

from __future__ import annotations


class SectorCap:
    """A lower cap binds new requests. Those that live may get what they were promised, up to the cap of before."""

    def __init__(self) -> None:
        self.sectors: int | None = None
        """That new requests may bring; None: any number."""
        self.live: int | None = None
        """That those that live may have: of before, until they need no more than `sectors`; then it is to be that."""

    def set(self, sectors: int | None) -> None:
        """Have so many at the most, for new requests."""
        self.sectors = sectors
        if sectors is None or (self.live is not None and sectors > self.live):
            self.live = sectors

    def within(self, sectors: int, *, growing: bool = False) -> int:
        """Return so many sectors, or as many as there may be: with requests that live (`growing`), or with new ones."""
        most = self.live if growing else self.sectors
        return sectors if most is None else min(sectors, most)
