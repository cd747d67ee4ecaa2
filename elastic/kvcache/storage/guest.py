"""The keys and values of another instance's blocks, in the layers that it has computed here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from elastic.errors import ConfigError, IntegrityError, StateError
from elastic.kvcache.storage.pool import KVPool
from elastic.kvcache.storage.reservation import Reservation
from elastic.kvcache.storage.sector_space import BlockGroup, Sector, SectorSpace, map_parts
from elastic.kvcache.storage.usage import SectorUsage
from elastic.memory.backends.streams import finish_queued_work


class GuestMemory(SectorSpace):
    """Sectors of another engine, its home, by the numbers that they have there. Guarded by the lock of its KV pool.

    The home says which are mapped. It never has more than `allot` was called with: pages for these are kept, in the
    layers that are here, so that none is refused later. `groups` are those of the whole model; `sectors` is the number
    that the home has (`BlockMemory.sectors`), where pages must be as large as here.
    """

    def __init__(self, kv: KVPool, groups: Sequence[BlockGroup], sectors: int) -> None:
        super().__init__(kv, groups, sectors)
        self.allotted = 0
        """Sectors that the home may have at the most."""
        self._reservation = Reservation(kv)
        self._closed = False
        kept = self._reservation
        self.usage = SectorUsage(
            used=lambda: self.mapped_pages,  # none is idle: the home must unmap sectors before
            check=self.check,
            promised=lambda: kept.pages,
            owed=lambda: kept.pages,
        )
        kv.join(self.usage)

    # -- what the home orders

    def allot(self, sectors: int) -> None:
        """Keep pages for so many sectors. Raises `CapacityError`, and nothing has changed.

        Raises `StateError` where more are mapped, `ConfigError` where there are not so many numbers.
        """
        with self.lock:
            self._require_open()
            mapped = self.mapped_count
            if sectors < mapped:
                raise StateError(f"{mapped} sectors are mapped; {sectors} cannot be allotted before some are unmapped")
            if sectors > self.sectors:
                raise ConfigError(f"sectors={sectors}: there are addresses for {self.sectors} at the most")
            self._reservation.resize(sectors * self.sector_pages - self.mapped_pages)
            self.allotted = sectors

    def add_layers(self, layers: Iterable[int]) -> None:
        """Have layers be here, with all mapped sectors mapped in them.

        Raises `CapacityError` where there is no room for what was allotted, `StateError` where a layer is here
        already: nothing has changed then.
        """
        with self.lock:
            self._require_open()
            chosen = self._require(layers, present=False)
            self._reservation.resize(self.allotted * self._size_with(chosen) - self.mapped_pages)
            try:
                pages = self._reservation.take(self._growth_with(chosen))
                try:
                    self._put_in(chosen, pages)
                except BaseException:
                    self._reservation.put_back(pages)
                    raise
            except BaseException:
                self._reservation.resize(self.allotted * self.sector_pages - self.mapped_pages)
                raise

    def growth(self, layers: frozenset[int]) -> int:
        """Count the pages that the mapped sectors need in layers that are not here."""
        with self.lock:
            return self._growth_with(layers)

    def remove_layers(self, layers: Iterable[int]) -> int:
        """Have layers be here no more: what is in them is lost. Return the pages that came free, and are kept no more.

        Raises `StateError` if one is not here.
        """
        with self.lock:
            chosen = self._require(layers, present=True)
            before = self.mapped_pages + self._reservation.pages
            finish_queued_work(self.kv.device)
            self._reservation.put_back(self._take_out(chosen))
            self._reservation.resize(self.allotted * self.sector_pages - self.mapped_pages)
            return before - self.mapped_pages - self._reservation.pages

    def map(self, sectors: Iterable[Sector]) -> None:
        """Map sectors, all or none; those that are mapped stay so.

        Raises `StateError` for more than were allotted, `CapacityError` where the system has no memory for the pages.
        """
        with self.lock:
            self._require_open()
            new = [(g, sector) for g, sector in dict.fromkeys(sectors) if sector not in self.groups[g].mapped]
            if not new:
                return
            if outside := [sector for _, sector in new if not 0 <= sector < self.sectors]:
                raise StateError(f"sectors {outside}: there are addresses for {self.sectors}")
            if (mapped := self.mapped_count + len(new)) > self.allotted:
                raise StateError(f"{mapped} sectors would be mapped, {self.allotted} were allotted; allot more first")
            pages = self._reservation.take(sum(self.groups[group].sector_pages for group, _ in new))
            parts = [part for g, s in new for part in self.groups[g].parts(self.groups[g].layers, (s,))]
            try:
                map_parts(parts, pages)
            except BaseException:
                self._reservation.put_back(pages)
                raise
            for group, sector in new:
                self.groups[group].mapped[sector] = None

    def unmap(self, sectors: Iterable[Sector]) -> None:
        """Unmap sectors; those that are not mapped: nothing happens. Their pages stay kept."""
        with self.lock:
            gone = [(g, sector) for g, sector in dict.fromkeys(sectors) if sector in self.groups[g].mapped]
            if gone:
                finish_queued_work(self.kv.device)
            for group, sector in gone:
                self._reservation.put_back(self.groups[group].unmap(sector))

    def check(self) -> None:
        """Recount; raises `IntegrityError`."""
        super().check()
        kept, mapped = self.allotted * self.sector_pages - self.mapped_pages, self.mapped_count
        if kept != self._reservation.pages or mapped > self.allotted:
            raise IntegrityError(
                f"{self._reservation.pages} pages are kept for {self.allotted} sectors, of which {mapped} are mapped; "
                f"{kept} should be"
            )

    def close(self) -> None:
        """Give everything back; what is in it is lost. Can be called twice."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            finish_queued_work(self.kv.device)
            for group in self.groups:
                group.close()
            self.allotted = 0
            self._reservation.resize(0)
            self.kv.leave(self.usage)

    # -- inside, under the lock

    def _require_open(self) -> None:
        if self._closed:
            raise StateError("this memory of another instance was closed; make a new one")
