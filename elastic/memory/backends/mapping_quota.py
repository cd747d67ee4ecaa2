"""Mappings that Linux keeps for reserved address space: counted, so that a shortage is an error here and no refusal."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from functools import cache

from elastic.errors import CapacityError

GAP = -1
"""In place of a page: nothing is mapped."""
Segment = tuple[int, int]
"""(first address, first page or `GAP`): consecutive pages, or none, up to the next segment."""
_FOR_OTHERS, _FOR_SPLITS = 8192, 4096


class MappingQuota:
    """Bound on the mappings that the places of a process have together. Thread-safe.

    `most` binds those who map. Unmapping the middle of a segment makes mappings too: `spare` more are kept for that, so
    that memory can be given back when no more can be mapped.
    """

    def __init__(self, most: int, spare: int) -> None:
        self.most = most
        self.spare = spare
        self.used = 0
        self._lock = threading.Lock()

    def add(self, count: int, *, unmapping: bool = False) -> None:
        """Count so many mappings more, or fewer. Raises `CapacityError` above the limit."""
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
        """Undo `add`, whatever its sign was."""
        with self._lock:
            self.used -= count


@cache
def process_quota() -> MappingQuota:
    """Return the quota of this process."""
    try:
        with open("/proc/sys/vm/max_map_count") as file:
            allowed = int(file.read())
    except OSError:
        allowed = 65530
    for_others = min(_FOR_OTHERS, allowed // 4)
    return MappingQuota(allowed - for_others, min(_FOR_SPLITS, for_others // 2))


class ReservedRange:
    """Reserved addresses, cut into segments: one mapping each."""

    def __init__(self, address: int, nbytes: int, page_bytes: int) -> None:
        self.starts = [address, address + nbytes]
        """Of the segments, one after another; the last one is the end of the range."""
        self.pages = [GAP]
        """The first one of each segment."""
        self._page_bytes = page_bytes

    def remap(self, start: int, stop: int, new: list[Segment]) -> PendingRemap:
        """Plan to have the segments `new` in [start, stop), joined with the neighbours that they continue."""
        first, last = bisect_right(self.starts, start) - 1, bisect_left(self.starts, stop)
        segments = list(new)
        if self.starts[first] < start:
            segments.insert(0, (self.starts[first], self.pages[first]))
        elif first:
            first -= 1
            segments.insert(0, (self.starts[first], self.pages[first]))
        if self.starts[last] > stop:
            segments.append((stop, self._page_at(last - 1, stop)))
        elif last < len(self.pages):
            segments.append((self.starts[last], self.pages[last]))
            last += 1
        joined = self._join(segments)
        return PendingRemap(self, first, last, joined, len(joined) - (last - first))

    def mapped(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """List the mapped parts of [start, stop) as (address, first page, pages)."""
        parts = []
        for i in range(bisect_right(self.starts, start) - 1, bisect_left(self.starts, stop)):
            if self.pages[i] != GAP:
                begin, end = max(start, self.starts[i]), min(stop, self.starts[i + 1])
                parts.append((begin, self._page_at(i, begin), (end - begin) // self._page_bytes))
        return parts

    def _page_at(self, i: int, address: int) -> int:
        return GAP if self.pages[i] == GAP else self.pages[i] + (address - self.starts[i]) // self._page_bytes

    def _join(self, segments: list[Segment]) -> list[Segment]:
        """Join neighbours as Linux does: it makes one mapping of those that fit."""
        joined = segments[:1]
        for start, page in segments[1:]:
            before, first_page = joined[-1]
            following = GAP if first_page == GAP else first_page + (start - before) // self._page_bytes
            if page != following:
                joined.append((start, page))
        return joined


@dataclass(frozen=True)
class PendingRemap:
    """A change of a range that is not made yet: its segments `first` to `stop`, by number, become these."""

    range: ReservedRange
    first: int
    stop: int
    segments: list[Segment]
    added: int
    """Mappings that there will be more."""


class AddressSpace:
    """The reservations of one place. Guarded by its user; the quota is shared."""

    def __init__(self, page_bytes: int, quota: MappingQuota | None = None) -> None:
        self.quota = quota or process_quota()
        self._page_bytes = page_bytes
        self._addresses: list[int] = []
        self._ranges: dict[int, ReservedRange] = {}

    def reserve(self, address: int, nbytes: int) -> None:
        """Count a reservation. Raises `CapacityError`."""
        self.quota.add(1)
        insort(self._addresses, address)
        self._ranges[address] = ReservedRange(address, nbytes, self._page_bytes)

    def unreserve(self, address: int) -> None:
        """Undo `reserve`."""
        self._addresses.remove(address)
        self.quota.undo(len(self._ranges.pop(address).pages))

    def range_at(self, address: int) -> ReservedRange:
        """Find the reservation of an address."""
        return self._ranges[self._addresses[bisect_right(self._addresses, address) - 1]]

    def plan_map(self, address: int, runs: list[tuple[int, int]]) -> PendingRemap:
        """Count what showing (first page, pages) one after another adds. Raises `CapacityError`, changing nothing."""
        segments, stop = [], address
        for first_page, count in runs:
            segments.append((stop, first_page))
            stop += count * self._page_bytes
        remap = self.range_at(address).remap(address, stop, segments)
        self.quota.add(remap.added)
        return remap

    def plan_unmap(self, address: int, nbytes: int) -> PendingRemap:
        """Count what showing nothing adds. Raises `CapacityError`, changing nothing."""
        remap = self.range_at(address).remap(address, address + nbytes, [(address, GAP)])
        self.quota.add(remap.added, unmapping=True)
        return remap

    def apply(self, remap: PendingRemap) -> int:
        """Record that a planned change was made; return how many more segments show pages."""
        changed, replaced = remap.range, slice(remap.first, remap.stop)
        pages = [page for _, page in remap.segments]
        added = changed.pages[replaced].count(GAP) - pages.count(GAP) + remap.added
        changed.starts[replaced] = [start for start, _ in remap.segments]
        changed.pages[replaced] = pages
        return added
