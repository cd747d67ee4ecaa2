"""The ledger of one place: who owns which physical page."""

from __future__ import annotations

import heapq
import logging
import threading
import weakref
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import neg
from typing import Protocol

from elastic.errors import CapacityError, IntegrityError, StateError
from elastic.memory.backends.base import PageBackend
from elastic.memory.background import janitor
from elastic.types import PlaceStatus

logger = logging.getLogger(__name__)
_FEW = 16


class MappedRange(Protocol):
    """Address space that shows pages."""

    @property
    def slots(self) -> Mapping[int, int]:
        """The page of each slot that shows one."""
        ...


class ReclaimableHolder(Protocol):
    """A range that still shows pages which nobody owns any more."""

    def reclaim(self, count: int) -> int:
        """Unmap up to `count` of them and give them back; returns how many."""
        ...


class PagePool:
    """Physical pages of one place under one budget. Thread-safe.

    Every page is owned (`take` … `give_back`) or free. A free page is idle (`rest`: a range still shows it, and loses
    it as soon as somebody takes it), parked (created, kept for reuse) or not created. Memory that the budget must cover
    but pages do not hold (embeddings, the final norm) is charged as whole pages, and free pages can be held back for an
    owner (`hold`): they may be idle or parked still, but nobody else gets them. So always

        charged + owned + held + free = budget,    idle + parked <= held + free.

    `status` takes pages that are not created for held ones first, then parked, then idle ones: what it shows of idle
    and parked pages is free.

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
        self.listeners: list[Callable[[], object]] = []
        """Told, under `tenants`, when pages may be had that could not be had before. They may only leave a note."""
        self.mapping_lock = threading.RLock()
        """Held by those who map pages (KV pools, blocks of weights) while they do; comes before the pool's own lock."""
        self._lock = threading.Lock()
        self._owner: dict[int, str] = {}  # page -> owner
        self._owned: Counter[str] = Counter()  # owner -> pages
        self._held: Counter[str] = Counter()
        self._charged: Counter[str] = Counter()  # owner -> pages that only count
        self._parked: list[int] = []  # the highest first: the lowest are taken
        self._idle: set[int] = set()
        self._resting: list[ReclaimableHolder] = []  # those that show idle pages, longest idle first
        self._absent = list(range(self.budget_pages))  # heap of pages that are not created
        self._in_creation: set[int] = set()
        self._none_in_creation = threading.Condition(self._lock)
        self._ranges: weakref.WeakSet[MappedRange] = weakref.WeakSet()
        self._closed = False

    @property
    def free_pages(self) -> int:
        """Pages that can still be taken, created or not."""
        return self.budget_pages - len(self._owner) - self._charged.total() - self._held.total()

    @property
    def idle_pages(self) -> int:
        """Pages that nobody owns and a range still shows."""
        return len(self._idle)

    @property
    def cached_pages(self) -> int:
        """Created pages that nobody owns."""
        return len(self._parked)

    def pages_of(self, owner: str) -> int:
        """Pages of one owner, charged ones included."""
        return self._owned[owner] + self._charged[owner] + self._held[owner]

    def owned_of(self, pages: Iterable[int]) -> list[int]:
        """Those of the pages that somebody owns; the others are free."""
        owner = self._owner
        return [page for page in pages if page in owner]

    def owns_any(self, pages: Iterable[int]) -> bool:
        """Whether somebody owns any of the pages."""
        return not self._owner.keys().isdisjoint(pages)

    def pages_for(self, nbytes: int) -> int:
        """How many pages hold `nbytes`."""
        return -(-nbytes // self.page_bytes)

    def allocate(self, owner: str, count: int) -> list[int]:
        """`count` created pages for `owner`, all or none; parked ones first. Raises `CapacityError`."""
        self._make_room(count)
        with self._lock:
            if count + len(self._in_creation) > self._unshown_pages:  # what is being created is needed too
                self._none_in_creation.wait_for(lambda: not self._in_creation)
            self._require_room(owner, count)
            fresh_count = max(0, count - len(self._parked))
            pages = self._unpark(count - fresh_count)
            fresh = [heapq.heappop(self._absent) for _ in range(fresh_count)]
            self._assign(pages, owner)
            self._assign(fresh, owner)
        if fresh:
            try:
                self.backend.create(fresh)
            except BaseException:
                with self._lock:
                    self._disown([*fresh, *pages])
                    self._forget(fresh)
                    self._park(pages)
                raise
        if self.ready_pages and len(self._parked) < self.ready_pages:
            janitor.submit(self.replenish)
        return pages + fresh

    def free(self, pages: Sequence[int]) -> None:
        """Park pages that no range shows any more, owned or idle ones."""
        with self._lock:
            idle = self._idle.intersection(pages)
            self._idle -= idle
            owned = self.owned_of(pages) if len(idle) < len(pages) else []
            self._disown(owned)
            self._park([*idle, *owned])
            closed = self._closed
        if closed:
            try:
                self.trim()
            except CapacityError as error:  # parked for good, in a pool that nobody uses
                logger.warning("pages of %s could not be given back: %s", self.name, str(error))

    def unregister_holder(self, holder: ReclaimableHolder) -> None:
        """`holder` shows no idle page any more."""
        with self._lock:
            if holder in self._resting:
                self._resting.remove(holder)

    def notify(self) -> None:
        """Pages may be had that could not be had before."""
        with self.mapping_lock:
            for listener in list(self.listeners):
                listener()

    def reassign(self, pages: Iterable[int], owner: str) -> None:
        """Change the owner of owned pages."""
        with self._lock:
            for page in pages:
                self._owned[self._owner[page]] -= 1
                self._owner[page] = owner
                self._owned[owner] += 1

    def mark_reclaimable(self, pages: Sequence[int], holder: ReclaimableHolder) -> None:
        """Owned pages are free from now on, though `holder` shows them until somebody takes them."""
        with self._lock:
            self._disown(pages)
            self._idle.update(pages)
            if holder not in self._resting:
                self._resting.append(holder)

    def reuse(self, pages: Sequence[int], owner: str, holder: ReclaimableHolder) -> None:
        """Idle pages of `holder` are owned again, all or none. Raises `CapacityError`."""
        with self._lock:
            self._require_open()
            if len(pages) > self.free_pages:
                raise self._short(owner, len(pages))
            self._idle.difference_update(pages)
            self._assign(pages, owner)
            if holder in self._resting:
                self._resting.remove(holder)

    def charge(self, owner: str, nbytes: int) -> None:
        """Count `nbytes` (rounded up to pages) of memory that lies outside the pages. Raises `CapacityError`."""
        count = self.pages_for(nbytes)
        self._make_room(count)
        with self._lock:
            self._require_room(owner, count)
            self._destroy_parked(keep=self._unshown_pages - count)
            self._charged[owner] += count

    def discharge(self, owner: str, nbytes: int) -> None:
        """Undo `charge`."""
        with self._lock:
            self._charged[owner] -= self.pages_for(nbytes)
            assert self._charged[owner] >= 0, (owner, nbytes)

    def reserve(self, owner: str, count: int) -> None:
        """Keep free pages back, so that nobody takes them before `let_go`. Raises `CapacityError`."""
        with self._lock:
            self._require_open()
            if count > self.free_pages:
                raise self._short(owner, count)
            self._held[owner] += count

    def unreserve(self, owner: str, count: int) -> None:
        """Undo `hold`."""
        with self._lock:
            self._held[owner] -= count
            assert self._held[owner] >= 0, (owner, count)

    def trim(self, keep: int = 0) -> int:
        """Give all parked pages but `keep` back to the system, highest ids first; returns the bytes released."""
        with self._lock:
            count = self._destroy_parked(keep)
            if self._closed and not self._owner and not self._idle:
                self.backend.close()
        return count * self.page_bytes

    def unmap_idle(self) -> None:
        """Take idle pages out of the ranges that show them; they are parked then."""
        for holder in list(self._resting):
            holder.reclaim(self.budget_pages)

    def replenish(self) -> None:
        """Create pages until `ready_pages` are parked, as far as the budget allows."""
        try:
            self.make_ready(self.ready_pages)
        except CapacityError:
            self.ready_pages = 0  # the device is full: creating ahead would only compete with those who need pages

    def make_ready(self, count: int) -> int:
        """Create pages until so many are parked, as far as the budget allows; returns how many. No lock is held."""
        with self._lock:
            room = min(count, self._unshown_pages) - len(self._parked) - len(self._in_creation)
            if self._closed or room <= 0:
                return 0
            pages = [heapq.heappop(self._absent) for _ in range(min(room, len(self._absent)))]
            self._in_creation.update(pages)
        created = False
        try:
            self.backend.create(pages)
            created = True
            return len(pages)
        finally:
            with self._lock:
                self._in_creation.difference_update(pages)
                (self._park if created else self._forget)(pages)
                self._none_in_creation.notify_all()

    def register_range(self, range_: MappedRange) -> None:
        """Know a range, for `check`."""
        self._ranges.add(range_)

    def status(self) -> PlaceStatus:
        """A snapshot of the ledger."""
        with self._lock:
            size, free = self.page_bytes, self.free_pages
            idle = min(len(self._idle), free)
            owners = self._charged + self._owned + self._held
            return PlaceStatus(
                name=self.name,
                page_bytes=size,
                budget_bytes=self.budget_pages * size,
                owners={owner: count * size for owner, count in sorted(owners.items())},
                free_bytes=free * size,
                idle_bytes=idle * size,
                parked_bytes=min(len(self._parked), free - idle) * size,
                mappings=self.backend.mappings,
            )

    def check(self) -> None:
        """Recount everything; raises `IntegrityError` with both sides of what differs.

        To be called when no page is on its way from the pool into a range or back.
        """
        with self._lock:
            mapped: Counter[int] = Counter(page for r in self._ranges for page in r.slots.values())
            shared = [page for page, count in mapped.items() if count > 1]
            every = Counter([*self._owner, *self._idle, *self._parked, *self._absent, *self._in_creation])
            created = len(self._owner) + len(self._idle) + len(self._parked) + len(self._in_creation)
            self._require(not shared, f"pages mapped more than once: {shared[:8]}")
            self._require_equal("mapped pages", set(mapped), "owned and idle pages", {*self._owner, *self._idle})
            self._require_equal("owners recounted", Counter(self._owner.values()), "owners", +self._owned)
            self._require_equal("pages", sorted(every.elements()), "ids", list(range(self.budget_pages)))
            if not self._in_creation:
                self._require_equal("created in the ledger", created, "created in the backend", self.backend.created)
            unowned = len(self._parked) + len(self._idle)
            free = self.free_pages + self._held.total()
            self._require(free >= unowned, f"{unowned} pages parked or idle, {free} free or held back")
            self._require(self.free_pages >= 0, f"{-self.free_pages} pages more than the budget")

    def close(self) -> None:
        """Give free pages back; owned ones go as their ranges close. Can be called twice."""
        with self._lock:
            self._closed = True
            self._none_in_creation.wait_for(lambda: not self._in_creation)
        self.unmap_idle()
        self.trim()

    @property
    def _unshown_pages(self) -> int:
        """Pages that nobody owns and no range shows."""
        return self.free_pages + self._held.total() - len(self._idle)

    def _make_room(self, count: int) -> None:
        """Try to have `count` free pages that no range shows: ask the reclaimers, then unmap idle ones."""
        for reclaimer in list(self.reclaimers):
            if count <= self.free_pages:
                break
            reclaimer(count - self.free_pages)
        for holder in list(self._resting):
            if count <= self._unshown_pages:
                break
            holder.reclaim(count - self._unshown_pages)

    def _destroy_parked(self, keep: int) -> int:
        surplus = self._parked[: max(0, len(self._parked) - max(0, keep))]
        if surplus:
            self.backend.destroy(surplus)
            del self._parked[: len(surplus)]
            self._forget(surplus)
        return len(surplus)

    def _assign(self, pages: Sequence[int], owner: str) -> None:
        self._owner.update(dict.fromkeys(pages, owner))
        self._owned[owner] += len(pages)

    def _disown(self, pages: Sequence[int]) -> None:
        self._owned.subtract(Counter(map(self._owner.pop, pages)))

    def _park(self, pages: Sequence[int]) -> None:
        if len(pages) <= _FEW:
            for page in pages:
                insort(self._parked, page, key=neg)
        else:
            self._parked += pages
            self._parked.sort(reverse=True)

    def _unpark(self, count: int) -> list[int]:
        """Take the lowest ones."""
        kept = len(self._parked) - count
        pages = self._parked[kept:]
        del self._parked[kept:]
        return pages[::-1]

    def _forget(self, pages: Sequence[int]) -> None:
        """They do not exist any more."""
        for page in pages:
            heapq.heappush(self._absent, page)

    def _require_room(self, owner: str, count: int) -> None:
        self._require_open()
        if count > min(self.free_pages, self._unshown_pages):
            raise self._short(owner, count)

    def _require_open(self) -> None:
        if self._closed:
            raise StateError(f"place {self.name} is closed; wrap the model again")

    def _short(self, owner: str, count: int) -> CapacityError:
        held = ", ".join(
            f"{o}: {n * self.page_bytes:,} bytes" for o, n in (self._charged + self._owned + self._held).items()
        )
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
