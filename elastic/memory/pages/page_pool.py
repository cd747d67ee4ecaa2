"""The ledger of one place: who owns which physical page."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from elastic.errors import CapacityError, IntegrityError, StateError
from elastic.memory.backends.base import PageBackend
from elastic.memory.pages.background import janitor
from elastic.memory.pages.free_pages import FreePages
from elastic.types import PlaceStatus

logger = logging.getLogger(__name__)
Reclaim = Callable[[int], int]
"""Asked to give up some number of pages; returns how many it did."""


class MappedRange(Protocol):
    """Address space that shows pages."""

    slots: dict[int, int]
    """The page of each slot that shows one."""


class PagePool:
    """Physical pages of one place under one budget. Thread-safe.

    Every page is owned (`allocate` … `free`) or free. A free page is reclaimable (a range still shows it, and loses it
    as soon as somebody takes it), cached (created, kept for reuse) or not created. Memory that the budget must cover
    but pages do not hold (embeddings, the final norm) is charged as whole pages, and free pages can be reserved for an
    owner: they may be reclaimable or cached still, but nobody else gets them. So always

        charged + owned + reserved + free = budget,    reclaimable + cached <= reserved + free.

    `status` takes pages that are not created for reserved ones first, then cached, then reclaimable ones: what it shows
    of the last two is free.

    Pages are created outside the lock; `replenish` makes some ahead of time, on the janitor's thread.
    """

    def __init__(self, name: str, backend: PageBackend, budget_bytes: int, *, ready_pages: int = 16) -> None:
        self.name = name
        self.backend = backend
        self.device = backend.device
        self.page_bytes = backend.page_bytes
        self.budget_pages = budget_bytes // self.page_bytes
        self.ready_pages = ready_pages
        self.reclaimers: list[Reclaim] = []
        """Asked in turn, without the pool's own lock, to free some number of pages when the budget is short."""
        self.claims: dict[object, Callable[[], int]] = {}
        """By who has caches here: pages that others are to leave to it; below zero, what it would give them."""
        self.listeners: list[Callable[[], object]] = []
        """Called under `mapping_lock` when pages may be had that could not be before. They may only leave a note."""
        self.mapping_lock = threading.RLock()
        """Held by those who map pages (KV pools, weight buffers) while they do; comes before the pool's own lock."""
        self._lock = threading.Lock()
        self._owner: dict[int, str] = {}  # page -> owner
        self._owned: Counter[str] = Counter()  # owner -> pages
        self._reserved: Counter[str] = Counter()
        self._charged: Counter[str] = Counter()  # owner -> pages that only count
        self.cached = FreePages(backend.pages_per_huge_page)
        """Created pages that nobody owns and no range shows. Changed under the pool's own lock."""
        self._reclaimable: set[int] = set()
        self._holders: list[Reclaim] = []
        """Of what still shows reclaimable pages: each unmaps and frees some. The longest at rest is first."""
        self._uncreated = FreePages(backend.pages_per_huge_page, self.budget_pages)
        self._in_creation: set[int] = set()
        self._none_in_creation = threading.Condition(self._lock)
        self.ranges: weakref.WeakSet[MappedRange] = weakref.WeakSet()
        """Those over this place that live, for `check`. Guarded by `mapping_lock`."""
        self._closed = False

    @property
    def free_pages(self) -> int:
        """Pages that can still be taken, created or not."""
        return self.budget_pages - len(self._owner) - self._charged.total() - self._reserved.total()

    def claimed(self, *, but: object) -> int:
        """Count the pages that all others claim."""
        return sum(count() for user, count in self.claims.items() if user is not but)

    def pages_of(self, owner: str) -> int:
        """Count the pages of one owner, charged and reserved ones included."""
        return self._owned[owner] + self._charged[owner] + self._reserved[owner]

    def owned_of(self, pages: Iterable[int]) -> list[int]:
        """Return those of the pages that somebody owns; the others are free."""
        return [page for page in pages if page in self._owner]

    def pages_for(self, nbytes: int) -> int:
        """Count the pages that hold `nbytes`."""
        return -(-nbytes // self.page_bytes)

    def shortage(self, message: str, pages: int, free: int | None = None, total: int | None = None) -> CapacityError:
        """Make the error of a request for `pages` where `free` of `total` are free (None: those of the whole place)."""
        free = self.free_pages if free is None else max(0, free)
        total = self.budget_pages if total is None else total
        size = self.page_bytes
        return CapacityError(message, requested_bytes=pages * size, free_bytes=free * size, total_bytes=total * size)

    def allocate(self, owner: str, count: int, *, huge_pages: bool = False) -> list[int]:
        """Give `owner` `count` created pages, all or none; cached ones first. Raises `CapacityError`.

        `huge_pages`: whole ones of the system before others, as many as are cached. Otherwise these stay whole as long
        as other pages will do.
        """
        self._make_room(count)
        with self._lock:
            if count + len(self._in_creation) > self._unshown_pages:  # what is being created is needed too
                self._none_in_creation.wait_for(lambda: not self._in_creation)
            self._require_free(owner, count, self._unshown_pages)
            most = self._creatable_pages
            cached = self.cached.take_whole(count) if huge_pages else []
            cached += self.cached.take(min(len(self.cached), count - len(cached)))
            lacking = count - len(cached)
            created = self._to_create(lacking, most)
            fresh, spare = created[:lacking], created[lacking:]
            self._assign([*cached, *fresh], owner)
            self._in_creation.update(spare)
        if created:
            try:
                self.backend.create(created)
            except BaseException:
                with self._lock:
                    self._disown([*cached, *fresh])
                    self._uncreated.add(fresh)
                    self.cached.add(cached)
                    self._end_creation(spare, self._uncreated)
                raise
            with self._lock:
                self._end_creation(spare, self.cached)
        if self.ready_pages and len(self.cached) < self.ready_pages:
            janitor.submit(self.replenish)
        return cached + fresh

    def free(self, pages: Sequence[int]) -> None:
        """Cache pages that no range shows any more, owned or reclaimable ones."""
        with self._lock:
            reclaimable = self._reclaimable.intersection(pages)
            self._reclaimable -= reclaimable
            owned = self.owned_of(pages) if len(reclaimable) < len(pages) else []
            self._disown(owned)
            self.cached.add([*reclaimable, *owned])
            closed = self._closed
        if closed:
            try:
                self.trim()
            except CapacityError as error:  # cached for good, in a pool that nobody uses
                logger.warning("pages of %s could not be given back: %s", self.name, str(error))

    def notify(self) -> None:
        """Tell the listeners that pages may be had that could not be had before."""
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

    def mark_reclaimable(self, pages: Sequence[int], holder: Reclaim) -> None:
        """Have owned pages be free from now on, though they are shown until `holder` is asked to give them up."""
        with self._lock:
            self._disown(pages)
            self._reclaimable.update(pages)
            if holder not in self._holders:
                self._holders.append(holder)

    def reuse(self, pages: Sequence[int], owner: str, holder: Reclaim) -> None:
        """Give `owner` the reclaimable pages of `holder`, all or none. Raises `CapacityError`."""
        with self._lock:
            self._require_free(owner, len(pages))
            self._reclaimable.difference_update(pages)
            self._assign(pages, owner)
            if holder in self._holders:
                self._holders.remove(holder)

    def unregister_holder(self, holder: Reclaim) -> None:
        """Note that `holder` has no reclaimable page any more."""
        with self._lock:
            if holder in self._holders:
                self._holders.remove(holder)

    def charge(self, owner: str, nbytes: int) -> None:
        """Count `nbytes` (rounded up to pages) of memory outside the pages. Raises `CapacityError`."""
        count = self.pages_for(nbytes)
        self._make_room(count)
        with self._lock:
            self._require_free(owner, count, self._unshown_pages)
            self._destroy_cached(keep=self._unshown_pages - count)
            self._charged[owner] += count

    def discharge(self, owner: str, nbytes: int) -> None:
        """Undo `charge`."""
        with self._lock:
            self._charged[owner] -= self.pages_for(nbytes)
            assert self._charged[owner] >= 0, (owner, nbytes)

    def reserve(self, owner: str, count: int) -> None:
        """Keep free pages back, so that nobody takes them before `unreserve`. Raises `CapacityError`."""
        with self._lock:
            self._require_free(owner, count)
            self._reserved[owner] += count

    def unreserve(self, owner: str, count: int) -> None:
        """Undo `reserve`."""
        with self._lock:
            self._reserved[owner] -= count
            assert self._reserved[owner] >= 0, (owner, count)

    def trim(self, keep: int = 0) -> int:
        """Give all cached pages but `keep` back to the system, highest ids first; return the bytes released."""
        with self._lock:
            count = self._destroy_cached(keep)
            if self._closed and not self._owner and not self._reclaimable:
                self.backend.close()
        return count * self.page_bytes

    def unmap_idle(self) -> None:
        """Take reclaimable pages out of the ranges that show them; they are cached then."""
        for holder in list(self._holders):
            holder(self.budget_pages)

    def give_back_unused(self) -> int:
        """Give every page that nobody needs back to the system, those of reclaimers first; return the bytes."""
        created = self.backend.created
        for reclaimer in list(self.reclaimers):
            reclaimer(self.budget_pages)
        self.unmap_idle()
        self.trim()
        return (created - self.backend.created) * self.page_bytes

    def replenish(self) -> None:
        """Create pages until `ready_pages` are cached, as far as the budget allows."""
        try:
            self.make_ready(self.ready_pages)
        except CapacityError:
            self.ready_pages = 0  # the device is full: creating ahead would only compete with those who need pages

    def make_ready(self, count: int, *, huge_pages: bool = False) -> int:
        """Create pages until so many are cached, as far as the budget allows; return how many. No lock is held.

        `huge_pages`: until so many are in whole ones, as long as there are such to create.
        """
        with self._lock:
            lacking = count - len(self.cached)
            if huge_pages:
                lacking = max(lacking, min(count - self.cached.whole, self._uncreated.whole))
            room = min(lacking - len(self._in_creation), self._creatable_pages)
            if self._closed or room <= 0:
                return 0
            pages = self._to_create(room, self._creatable_pages)
            self._in_creation.update(pages)
        created = False
        try:
            self.backend.create(pages)
            created = True
            return len(pages)
        finally:
            with self._lock:
                self._end_creation(pages, self.cached if created else self._uncreated)

    def status(self) -> PlaceStatus:
        """Return a snapshot of the ledger."""
        with self._lock:
            size, free = self.page_bytes, self.free_pages
            reclaimable = min(len(self._reclaimable), free)
            owners = self._charged + self._owned + self._reserved
            return PlaceStatus(
                name=self.name,
                page_bytes=size,
                budget_bytes=self.budget_pages * size,
                owners={owner: count * size for owner, count in sorted(owners.items())},
                free_bytes=free * size,
                idle_bytes=reclaimable * size,
                parked_bytes=min(len(self.cached), free - reclaimable) * size,
                mappings=self.backend.mappings,
            )

    def check(self) -> None:
        """Recount everything; raises `IntegrityError` with both sides of what differs.

        Whoever maps pages without `mapping_lock` must not do so meanwhile.
        """
        with self.mapping_lock, self._lock:
            mapped: Counter[int] = Counter(page for r in self.ranges for page in r.slots.values())
            mapped_twice = [page for page, count in mapped.items() if count > 1]
            created = [*self._owner, *self._reclaimable, *self.cached, *self._in_creation]
            unowned, free = len(self._reclaimable) + len(self.cached), self.free_pages
            reserved = self._reserved.total()
            books: list[tuple[str, object, object]] = [
                ("mapped pages and owned and reclaimable pages", set(mapped), {*self._owner, *self._reclaimable}),
                ("owners recounted and owners", Counter(self._owner.values()), +self._owned),
                ("pages and ids", sorted([*created, *self._uncreated]), list(range(self.budget_pages))),
            ]
            if not self._in_creation:
                books.append(("created in the ledger and in the backend", len(created), self.backend.created))
            faults = [f"{what} differ: {a!r} against {b!r}" for what, a, b in books if a != b]
            if mapped_twice:
                faults.insert(0, f"pages mapped more than once: {mapped_twice[:8]}")
            if free < 0 or unowned > free + reserved:
                faults.append(f"{unowned} pages are cached or reclaimable, {free} free and {reserved} reserved")
            if faults:
                raise IntegrityError(f"place {self.name}: {'; '.join(faults)}")

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
        return self.free_pages + self._reserved.total() - len(self._reclaimable)

    @property
    def _creatable_pages(self) -> int:
        """Pages that may still be created while those that are cached stay so."""
        return self._unshown_pages - len(self.cached) - len(self._in_creation)

    def _to_create(self, count: int, most: int) -> list[int]:
        """Take so many pages to create; or up to `most`, where these end a huge page that is created at once."""
        size = self.backend.pages_per_huge_page
        spare = min(-count % size, most - count)
        whole = self._uncreated.take_whole(count + spare if 0 < spare <= self.ready_pages else count)
        return whole + self._uncreated.take(min(max(0, count - len(whole)), len(self._uncreated)))

    def _end_creation(self, pages: Sequence[int], kind: FreePages) -> None:
        self._in_creation.difference_update(pages)
        kind.add(pages)
        self._none_in_creation.notify_all()

    def _make_room(self, count: int) -> None:
        """Try to have `count` free pages that no range shows: ask the reclaimers, then unmap reclaimable ones."""
        for reclaimer in list(self.reclaimers):
            if count <= self.free_pages:
                break
            reclaimer(count - self.free_pages)
        for holder in list(self._holders):
            if count <= self._unshown_pages:
                break
            holder(count - self._unshown_pages)

    def _destroy_cached(self, keep: int) -> int:
        """Give all cached pages but `keep` back to the system; return how many."""
        surplus = self.cached.take_last(max(0, len(self.cached) - max(0, keep)))
        if surplus:
            try:
                self.backend.destroy(surplus)
            except BaseException:
                self.cached.add(surplus)
                raise
            self._uncreated.add(surplus)
        return len(surplus)

    def _assign(self, pages: Sequence[int], owner: str) -> None:
        self._owner.update(dict.fromkeys(pages, owner))
        self._owned[owner] += len(pages)

    def _disown(self, pages: Sequence[int]) -> None:
        self._owned.subtract(Counter(map(self._owner.pop, pages)))

    def _require_free(self, owner: str, count: int, unshown: int | None = None) -> None:
        """Raise `CapacityError` where fewer pages are free, or unshown where that counts; `StateError` once closed."""
        if self._closed:
            raise StateError(f"place {self.name} is closed; wrap the model again")
        if count > self.free_pages or (unshown is not None and count > unshown):
            owners = (self._charged + self._owned + self._reserved).items()
            held = ", ".join(f"{name}: {pages * self.page_bytes:,} bytes" for name, pages in owners)
            raise self.shortage(
                f"place {self.name} has too few free pages for {owner}; ask for less, free what holds them "
                f"({held or 'nothing'}), or give the place a larger budget",
                count,
            )
