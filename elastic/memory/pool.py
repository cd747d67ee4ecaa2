"""The ledger of one place: who owns which physical page."""

from __future__ import annotations

import heapq
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from elastic.errors import CapacityError, IntegrityError, StateError
from elastic.memory.backend import PageBackend
from elastic.memory.janitor import janitor
from elastic.types import PlaceStatus

if TYPE_CHECKING:
    from elastic.memory.range import VirtualRange


class PagePool:
    """Physical pages of one place under one budget. Thread-safe.

    Every page is owned (`take` … `give_back`), parked (created, free, kept for reuse) or not created. Memory that the
    budget must cover but pages do not hold (embeddings, norms) is charged as whole pages. So always

        charged + owned + free = budget,    parked <= free.

    Pages are created outside the lock; `replenish` makes some ahead of time, on the janitor's thread.
    """

    def __init__(self, name: str, backend: PageBackend, budget_bytes: int, *, ready_pages: int = 16) -> None:
        self.name = name
        self.backend = backend
        self.page_bytes = backend.page_bytes
        self.budget_pages = budget_bytes // self.page_bytes
        self.ready_pages = ready_pages
        self.reclaimers: list[Callable[[int], int]] = []
        """Asked in turn, without the pool's own lock, to free some number of pages when the budget is short."""
        self.tenants = threading.RLock()
        """Held by those who map pages (KV pools) while they do; comes before the pool's own lock."""
        self._lock = threading.Lock()
        self._owner: dict[int, str] = {}  # page -> owner
        self._owned: Counter[str] = Counter()  # owner -> pages
        self._charged: Counter[str] = Counter()  # owner -> pages that only count
        self._parked: list[int] = []  # heap
        self._absent = list(range(self.budget_pages))  # heap of pages that are not created
        self._in_creation: set[int] = set()
        self._ranges: weakref.WeakSet[VirtualRange] = weakref.WeakSet()
        self._closed = False

    @property
    def free_pages(self) -> int:
        """Pages that can still be taken, created or not."""
        return self.budget_pages - len(self._owner) - self._charged.total()

    @property
    def parked_pages(self) -> int:
        """Created pages that nobody owns."""
        return len(self._parked)

    def pages_of(self, owner: str) -> int:
        """Pages of one owner, charged ones included."""
        return self._owned[owner] + self._charged[owner]

    def pages_for(self, nbytes: int) -> int:
        """How many pages hold `nbytes`."""
        return -(-nbytes // self.page_bytes)

    def take(self, owner: str, count: int) -> list[int]:
        """`count` created pages for `owner`, all or none; parked ones first. Raises `CapacityError`."""
        if count > self.free_pages:
            self._reclaim(count)
        with self._lock:
            self._require_open()
            if count > self.free_pages:
                raise self._short(owner, count)
            fresh_count = max(0, count - len(self._parked))
            pages = [heapq.heappop(self._parked) for _ in range(count - fresh_count)]
            fresh = [heapq.heappop(self._absent) for _ in range(fresh_count)]
            self._assign(pages, owner)
            self._assign(fresh, owner)
        if fresh:
            try:
                self.backend.create(fresh)
            except BaseException:
                with self._lock:
                    self._clear(fresh, self._absent)
                    self._clear(pages, self._parked)
                raise
        if self.ready_pages and len(self._parked) < self.ready_pages:
            janitor.put(self.replenish)
        return pages + fresh

    def give_back(self, pages: Sequence[int]) -> None:
        """Park pages that no range shows any more."""
        with self._lock:
            self._clear(pages, self._parked)

    def move(self, pages: Iterable[int], owner: str) -> None:
        """Change the owner of owned pages."""
        with self._lock:
            for page in pages:
                self._owned[self._owner[page]] -= 1
                self._owner[page] = owner
                self._owned[owner] += 1

    def charge(self, owner: str, nbytes: int) -> None:
        """Count `nbytes` (rounded up to pages) of memory that lies outside the pages. Raises `CapacityError`."""
        count = self.pages_for(nbytes)
        with self._lock:
            self._require_open()
            if count > self.free_pages:
                raise self._short(owner, count)
            self._destroy_parked(keep=self.free_pages - count)
            self._charged[owner] += count

    def discharge(self, owner: str, nbytes: int) -> None:
        """Undo `charge`."""
        with self._lock:
            self._charged[owner] -= self.pages_for(nbytes)
            assert self._charged[owner] >= 0, (owner, nbytes)

    def trim(self, keep: int = 0) -> int:
        """Give all parked pages but `keep` back to the system, highest ids first; returns the bytes released."""
        with self._lock:
            count = self._destroy_parked(keep)
            if self._closed and not self._owner:
                self.backend.close()
        return count * self.page_bytes

    def replenish(self) -> None:
        """Create pages until `ready_pages` are parked, as far as the budget allows."""
        with self._lock:
            room = min(self.ready_pages, self.free_pages) - len(self._parked) - len(self._in_creation)
            if self._closed or room <= 0:
                return
            pages = [heapq.heappop(self._absent) for _ in range(min(room, len(self._absent)))]
            self._in_creation.update(pages)
        target = self._absent
        try:
            self.backend.create(pages)
            target = self._parked
        except CapacityError:
            self.ready_pages = 0  # the device is full: creating ahead would only compete with those who need pages
        finally:
            with self._lock:
                self._in_creation.difference_update(pages)
                for page in pages:
                    heapq.heappush(target, page)

    def adopt(self, range_: VirtualRange) -> None:
        """Know a range, for `check`."""
        self._ranges.add(range_)

    def status(self) -> PlaceStatus:
        """A snapshot of the ledger."""
        with self._lock:
            size = self.page_bytes
            owners = self._charged + self._owned
            return PlaceStatus(
                name=self.name,
                page_bytes=size,
                budget_bytes=self.budget_pages * size,
                owners={owner: count * size for owner, count in sorted(owners.items())},
                free_bytes=self.free_pages * size,
                parked_bytes=len(self._parked) * size,
                mappings=self.backend.mappings,
            )

    def check(self) -> None:
        """Recount everything; raises `IntegrityError` with both sides of what differs.

        To be called when no page is on its way from the pool into a range or back.
        """
        with self._lock:
            mapped: Counter[int] = Counter(page for r in self._ranges for page in r.slots.values())
            shared = [page for page, count in mapped.items() if count > 1]
            every = Counter([*self._owner, *self._parked, *self._absent, *self._in_creation])
            created = len(self._owner) + len(self._parked) + len(self._in_creation)
            self._require(not shared, f"pages mapped more than once: {shared[:8]}")
            self._require_equal("mapped pages", set(mapped), "owned pages", set(self._owner))
            self._require_equal("owners recounted", Counter(self._owner.values()), "owners", +self._owned)
            self._require_equal("pages", sorted(every.elements()), "ids", list(range(self.budget_pages)))
            if not self._in_creation:
                self._require_equal("created in the ledger", created, "created in the backend", self.backend.created)
            self._require(self.free_pages >= len(self._parked), f"{len(self._parked)} parked, {self.free_pages} free")

    def close(self) -> None:
        """Give parked pages back; owned ones go as their ranges close. Can be called twice."""
        with self._lock:
            self._closed = True
        self.trim()

    def _reclaim(self, count: int) -> None:
        for reclaimer in list(self.reclaimers):
            missing = count - self.free_pages
            if missing > 0:
                reclaimer(missing)

    def _destroy_parked(self, keep: int) -> int:
        surplus = sorted(self._parked)[keep:]
        if surplus:
            self.backend.destroy(surplus)
            gone = set(surplus)
            self._parked = [page for page in self._parked if page not in gone]
            heapq.heapify(self._parked)
            for page in surplus:
                heapq.heappush(self._absent, page)
        return len(surplus)

    def _assign(self, pages: Sequence[int], owner: str) -> None:
        self._owner.update(dict.fromkeys(pages, owner))
        self._owned[owner] += len(pages)

    def _clear(self, pages: Sequence[int], heap: list[int]) -> None:
        for page in pages:
            self._owned[self._owner.pop(page)] -= 1
            heapq.heappush(heap, page)

    def _require_open(self) -> None:
        if self._closed:
            raise StateError(f"place {self.name} is closed; wrap the model again")

    def _short(self, owner: str, count: int) -> CapacityError:
        held = ", ".join(f"{o}: {n * self.page_bytes:,} bytes" for o, n in (self._charged + self._owned).items())
        return CapacityError(
            f"place {self.name} has too few free pages for {owner}; ask for less, free what holds them "
            f"({held or 'nothing'}), or give the place a larger budget",
            requested_bytes=count * self.page_bytes,
            free_bytes=self.free_pages * self.page_bytes,
            total_bytes=self.budget_pages * self.page_bytes,
        )

    def _require(self, holds: bool, message: str) -> None:
        if not holds:
            raise IntegrityError(f"place {self.name}: {message}")

    def _require_equal(self, left_name: str, left: object, right_name: str, right: object) -> None:
        self._require(left == right, f"{left_name} and {right_name} differ: {left!r} against {right!r}")
