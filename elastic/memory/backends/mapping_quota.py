"""Mappings that Linux keeps for reserved address space: counted, so that a shortage is an error here and no refusal."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from functools import cache

from elastic.errors import CapacityError

GAP = -1
_LEFT_FOR_OTHERS, _LEFT_FOR_SPLITS = 8192, 4096


class MappingQuota:
    """How many mappings the places of a process may have together. Thread-safe.

    `most` binds those who map. Unmapping the middle of a stretch makes mappings too: `spare` more are kept for that, so
    that memory can be given back when no more can be mapped.
    """

    def __init__(self, most: int, spare: int) -> None:
        self.most = most
        self.spare = spare
        self.used = 0
        self._lock = threading.Lock()

    def add(self, count: int, *, unmapping: bool = False) -> None:
        """So many more, or fewer. Raises `CapacityError` above the limit."""
        with self._lock:
            if count > 0 and self.used + count > self.most + (self.spare if unmapping else 0):
                raise CapacityError(
                    f"{self.used:,} mappings are in use, and of those that Linux allows a process (vm.max_map_count) "
                    f"{self.most:,} are for pages: {count:,} more are too many; use a larger page_bytes or fewer rows, "
                    "or have vm.max_map_count raised",
                    requested_bytes=0,
                    free_bytes=0,
                    total_bytes=0,
                )
            self.used += count

    def undo(self, count: int) -> None:
        """Undo `add`."""
        with self._lock:
            self.used -= count


@cache
def process_quota() -> MappingQuota:
    """That of this process."""
    try:
        with open("/proc/sys/vm/max_map_count") as file:
            allowed = int(file.read())
    except OSError:
        allowed = 65530
    left = min(_LEFT_FOR_OTHERS, allowed // 4)
    return MappingQuota(allowed - left, min(_LEFT_FOR_SPLITS, left // 2))


@dataclass(frozen=True)
class PendingRemap:
    """A change of a reservation that is not made yet: stretches `first` to `stop`, by number, become these."""

    reservation: ReservedRange
    first: int
    stop: int
    stretches: list[tuple[int, int]]

    @property
    def added(self) -> int:
        """Mappings that there will be more."""
        return len(self.stretches) - (self.stop - self.first)

    @property
    def added_mapped(self) -> int:
        """Of them, those that show pages."""
        gone = self.reservation.pages[self.first : self.stop]
        return sum(page != GAP for _, page in self.stretches) - sum(page != GAP for page in gone)

    def make(self) -> None:
        there = self.reservation
        there.starts[self.first : self.stop] = [start for start, _ in self.stretches]
        there.pages[self.first : self.stop] = [page for _, page in self.stretches]


class ReservedRange:
    """Reserved addresses, cut into stretches of consecutive pages and gaps: one mapping each."""

    def __init__(self, address: int, nbytes: int, page_bytes: int) -> None:
        self.starts = [address]
        self.pages = [GAP]
        """For each stretch the first page that it shows."""
        self.stop = address + nbytes
        self._page_bytes = page_bytes

    def cut(self, start: int, stop: int, new: list[tuple[int, int]]) -> PendingRemap:
        """What becomes of the stretches if [start, stop) is cut into `new`, as (address, page)."""
        first, last = bisect_right(self.starts, start) - 1, bisect_left(self.starts, stop)
        stretches, end = list(new), self._end(last - 1)
        if self.starts[first] < start:
            stretches.insert(0, (self.starts[first], self.pages[first]))
        elif first:
            first -= 1
            stretches.insert(0, (self.starts[first], self.pages[first]))
        if end > stop:
            stretches.append((stop, self._at(last - 1, stop)))
        elif last < len(self.starts):
            stretches.append((self.starts[last], self.pages[last]))
            last += 1
        return PendingRemap(self, first, last, self._joined(stretches))

    def shown(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """The mapped parts of [start, stop) as (address, first page, pages)."""
        found = []
        for i in range(bisect_right(self.starts, start) - 1, bisect_left(self.starts, stop)):
            if self.pages[i] != GAP:
                begin, end = max(start, self.starts[i]), min(stop, self._end(i))
                found.append((begin, self._at(i, begin), (end - begin) // self._page_bytes))
        return found

    def _end(self, i: int) -> int:
        return self.starts[i + 1] if i + 1 < len(self.starts) else self.stop

    def _at(self, i: int, address: int) -> int:
        """What stretch `i` shows at an address of it."""
        return GAP if self.pages[i] == GAP else self.pages[i] + (address - self.starts[i]) // self._page_bytes

    def _joined(self, stretches: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Linux makes one mapping of neighbours that fit."""
        joined = stretches[:1]
        for start, page in stretches[1:]:
            before, shown = joined[-1]
            follows = GAP if shown == GAP else shown + (start - before) // self._page_bytes
            if page != follows:
                joined.append((start, page))
        return joined


class AddressSpace:
    """The reservations of one place. Guarded by its user; the quota is shared."""

    def __init__(self, page_bytes: int, quota: MappingQuota | None = None) -> None:
        self._page_bytes = page_bytes
        self._quota = quota or process_quota()
        self._addresses: list[int] = []
        self._reservations: dict[int, ReservedRange] = {}
        self.mapped = 0
        """Stretches that show pages."""

    def reserve(self, address: int, nbytes: int) -> None:
        self._quota.add(1)
        insort(self._addresses, address)
        self._reservations[address] = ReservedRange(address, nbytes, self._page_bytes)

    def unreserve(self, address: int) -> None:
        self._addresses.remove(address)
        gone = self._reservations.pop(address)
        self.mapped -= sum(page != GAP for page in gone.pages)
        self._quota.undo(len(gone.starts))

    def map(self, address: int, pieces: list[tuple[int, int]]) -> PendingRemap:
        """To show (first page, pages) one after another. Raises `CapacityError`; then nothing has changed."""
        new, at = [], address
        for first, count in pieces:
            new.append((at, first))
            at += count * self._page_bytes
        return self._cut(address, at, new, unmapping=False)

    def unmap(self, address: int, nbytes: int) -> PendingRemap:
        """To show nothing. Raises `CapacityError`; then nothing has changed."""
        return self._cut(address, address + nbytes, [(address, GAP)], unmapping=True)

    def make(self, cut: PendingRemap) -> None:
        """It is so now."""
        self.mapped += cut.added_mapped
        cut.make()

    def drop(self, cut: PendingRemap) -> None:
        """It will not be so."""
        self._quota.undo(cut.added)

    def shown(self, address: int, nbytes: int) -> list[tuple[int, int, int]]:
        """What is mapped there, as (address, first page, pages)."""
        return self._of(address).shown(address, address + nbytes)

    def _cut(self, start: int, stop: int, new: list[tuple[int, int]], *, unmapping: bool) -> PendingRemap:
        cut = self._of(start).cut(start, stop, new)
        self._quota.add(cut.added, unmapping=unmapping)
        return cut

    def _of(self, address: int) -> ReservedRange:
        return self._reservations[self._addresses[bisect_right(self._addresses, address) - 1]]
