"""The parameters of one layer in pages of one place, side by side in one range of addresses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext

import torch

from elastic.errors import ElasticError
from elastic.memory.backends.base import runs
from elastic.memory.backends.rank_memory import MemoryReader, read_into
from elastic.memory.backends.streams import finish_queued_work, synchronize
from elastic.memory.pages.background import janitor
from elastic.memory.pages.mapped_storage import MappedStorage
from elastic.memory.pages.page_pool import PagePool
from elastic.memory.pages.virtual_range import VirtualRange
from elastic.memory.rate_limit import RateLimiter, YieldingPace
from elastic.memory.weight_layout import LayerLayout, pages_under

logger = logging.getLogger(__name__)
RETAINED = "retained"
PAGES_AT_ONCE = 64
"""Created before one hold of the mapping lock, under which all that are ready are mapped."""


class WeightBuffer:
    """Pages for one layer. Thread-safe, under the mapping lock of its page pool.

    `allocate` (pages owned) and `make_reclaimable` (pages free, still mapped, lost one by one to whoever takes them)
    are a pair; `show` makes the parameters, each a storage of its own, and `hide` drops them. A buffer that a tensor
    outside still shows is given up with `orphan`: its pages are `retained` until that tensor dies. `shrink` gives up
    some parameters only, `extend` has more pages. `slots`: the pages to be filled, by number; None: all.
    """

    def __init__(self, pool: PagePool, nbytes: int, *, slots: Collection[int] | None = None) -> None:
        self.pool = pool
        self.slots = set(range(pool.pages_for(nbytes)) if slots is None else slots)
        """The pages that it needs, by number."""
        self._range = VirtualRange(pool, max(1, pool.pages_for(nbytes)))
        self.shown: dict[str, tuple[int, MappedStorage]] = {}
        """What it shows, parameters and runs by name: the offset of each, and its memory."""
        self._parameters: dict[str, torch.Tensor] = {}
        self._given_up: list[tuple[int, MappedStorage]] = []  # tensors outside show them, or did a moment ago
        self._leaving: set[int] = set()  # slots that a `shrink` frees when queued work is over, and nobody else
        self._orphaned = False
        self._closed = False
        self._on_freed: Callable[[int], object] = lambda pages: None

    def allocate(self, owner: str, pace: RateLimiter | None = None) -> None:
        """Have every page mapped and owned, created at a pace; raise `CapacityError` with none owned.

        Pages are mapped a few at a time, so that a KV cache that grows meanwhile waits neither long nor for pages that
        are being created.
        """
        try:
            with self.pool.mapping_lock:
                self.pool.reuse(list(self._range.slots.values()), owner, self.reclaim)
            self.extend(owner, pace)
        except BaseException:
            self.make_reclaimable()
            raise

    @property
    def unmapped_pages(self) -> int:
        """Pages that it needs and has not."""
        return len(self.slots - self._range.slots.keys())

    def adopt(self, slots: Collection[int], owner: str) -> int:
        """Need these pages too, by number; return how many of them are mapped, as `retained` ones, and owned now."""
        with self.pool.mapping_lock:
            self.slots |= set(slots)
            retained = [self._range.slots[slot] for slot in slots if slot in self._range.slots]
            self.pool.reassign(retained, owner)
            return len(retained)

    def extend(self, owner: str, pace: RateLimiter | None = None) -> None:
        """Have what it needs mapped and owned beside what it shows; raise `CapacityError` with some of it missing.

        A few pages at a time: huge pages where they are shown so.
        """
        size = self.pool.backend.pages_per_huge_page
        for first, count in runs(sorted(self.slots - self._range.slots.keys())):
            slot, stop = first, first + count
            while slot < stop:
                before = -slot % size  # pages before the next huge one
                least = min(before or PAGES_AT_ONCE, PAGES_AT_ONCE, stop - slot)
                made = self.pool.make_ready(least, huge_pages=not before)
                if pace is not None:
                    pace.acquire(made * self.pool.page_bytes)
                most = least if before else min(stop - slot, max(least, len(self.pool.cached) // size * size))
                slot += self._map(slot, most, owner, huge_pages=not before)

    @property
    def page_numbers(self) -> tuple[int, ...]:
        """The pages of the place that it needs and shows, in order."""
        with self.pool.mapping_lock:
            return tuple(page for slot, page in sorted(self._range.slots.items()) if slot in self.slots)

    def read(
        self,
        reader: MemoryReader,
        pieces: Iterable[tuple[int, int]],
        rate: RateLimiter,
        pace: YieldingPace | None = None,
        *,
        at: int = 0,
    ) -> None:
        """Copy pieces (offset, bytes) of another process's memory side by side into its own pages, from byte `at` on.

        Raises `StateError` where the memory cannot be read.
        """
        address = self._range.address + at
        for offset, nbytes in pieces:
            with nullcontext() if pace is None else pace.copying(nbytes):
                shown = MappedStorage(address, nbytes, self.pool.device, lambda: None)
                read_into(reader, shown.tensor(torch.uint8), [(offset, nbytes)])
            address += nbytes
            rate.acquire(nbytes)

    def make_reclaimable(self) -> None:
        """Free the pages when queued work on them is over: whoever needs some takes them out of this buffer."""
        assert not self.shown, "hide first"
        (synchronize if self._given_up else finish_queued_work)(self.pool.device)
        with self.pool.mapping_lock:
            owned = self.pool.owned_of(self._range.slots.values())
            if owned:
                self.pool.mark_reclaimable(owned, self.reclaim)
                self.pool.notify()

    def reclaim(self, count: int) -> int:
        """Unmap up to `count` reclaimable pages, the last ones first; return how many."""
        with self.pool.mapping_lock:
            unmapped = 0
            if self.pool.owned_of(self._range.slots.values()):
                return 0  # allocated again meanwhile
            for first, length in reversed(runs(sorted(self._range.slots))):
                taken = min(length, count - unmapped)
                if taken:
                    self.pool.free(self._range.unmap(first + length - taken, taken))
                    unmapped += taken
            if not self._range.slots:
                self.pool.unregister_holder(self.reclaim)
            return unmapped

    def show(self, layout: LayerLayout) -> dict[str, torch.Tensor]:
        """View the parameters by name, [shape in the checkpoint] each, in its dtypes; the same tensors until `hide`."""
        for name, parameter in layout.parameters.items():
            if name not in self._parameters:
                part = self.show_part(name, parameter.offset, parameter.nbytes, parameter.dtype)
                self._parameters[name] = parameter.show(part)
        return {name: self._parameters[name] for name in layout.parameters}

    def show_part(self, key: str, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """View a run of bytes, as [elements] of a dtype, under a name that no parameter and no other run has."""
        if key not in self.shown:
            address = self._range.address + offset
            self.shown[key] = offset, MappedStorage(address, nbytes, self.pool.device, self._note_death)
        return self.shown[key][1].tensor(dtype)

    def hide(self) -> bool:
        """Drop the parameters; return whether no tensor outside shows one."""
        self._parameters.clear()
        for _, storage in self.shown.values():
            storage.drop()
        if any(storage.alive for _, storage in [*self.shown.values(), *self._given_up]):
            return False
        self.shown.clear()
        return True

    def orphan(self, on_freed: Callable[[int], object]) -> int:
        """Give up a buffer that tensors outside still show.

        Returns the pages freed now; the others are `retained`, and `on_freed` is called with how many of them become
        free when the last such tensor dies.
        """
        self._orphaned = True
        return self.shrink(list(self.shown), on_freed)

    def shrink(
        self, names: Iterable[str], on_freed: Callable[[int], object], keep: Collection[int] | None = None
    ) -> int:
        """Give up some of what is shown, and the pages that hold nothing else, or all but those to keep; as `orphan`.

        `keep`: pages by number; they hold all that is still shown. None: just these.
        """
        with self.pool.mapping_lock:
            self._on_freed = on_freed
            for name in names:
                offset, storage = self.shown.pop(name)
                self._parameters.pop(name, None)
                storage.drop()
                if storage.alive:
                    self._given_up.append((offset, storage))
            self.slots = self._slots_under(self.shown.values()) if keep is None else set(keep)
            retained = self._slots_under(self._given_up) - self.slots
            self.pool.reassign((self._range.slots[slot] for slot in retained), RETAINED)
            self._leaving = self._range.slots.keys() - self.slots - retained
        finish_queued_work(self.pool.device)
        with self.pool.mapping_lock:
            leaving, self._leaving = self._leaving, set()
            freed = self._free(leaving)
        janitor.submit(self._free_dead)  # for what died in between
        return freed

    def close(self) -> None:
        """Give pages and addresses back; with tensors outside, when the last of them dies. Can be called twice.

        What the driver refuses to unmap stays reclaimable: free, and taken by whoever needs it.
        """
        if not self.hide():
            if not self._orphaned:
                self.orphan(lambda pages: None)
            return
        self.make_reclaimable()
        with self.pool.mapping_lock:
            if self._closed:
                return
            try:
                self.reclaim(len(self._range.slots))
                self._range.close()
                self._closed = True
            except ElasticError as error:
                logger.warning("pages of %s could not be given back yet: %s", self.pool.name, str(error))

    def _map(self, slot: int, count: int, owner: str, *, huge_pages: bool) -> int:
        with self.pool.mapping_lock:
            pages = self.pool.allocate(owner, count, huge_pages=huge_pages)
            try:
                self._range.map(slot, pages)
            except BaseException:
                self.pool.free(pages)
                raise
        return count

    def _slots_under(self, storages: Iterable[tuple[int, MappedStorage]]) -> set[int]:
        return {slot for at, storage in storages for slot in pages_under(at, storage.nbytes, self.pool.page_bytes)}

    def _free(self, slots: Iterable[int]) -> int:
        """Unmap slots and free their pages. What the driver refuses now is tried again when a tensor dies."""
        freed = 0
        try:
            for first, count in runs(sorted(slots)):
                self.pool.free(self._range.unmap(first, count))
                freed += count
        except ElasticError as error:
            logger.warning("pages of %s could not be given back yet: %s", self.pool.name, str(error))
        return freed

    def _note_death(self) -> None:
        """Called by finalizers, so from anywhere: takes no lock."""
        if self._given_up:
            janitor.submit(self._free_dead)

    def _free_dead(self) -> None:
        """Free the pages of what was given up and no tensor shows any more, when work queued on it is over."""
        with self.pool.mapping_lock:
            dead = [given_up for given_up in self._given_up if not given_up[1].alive]
        if dead:
            synchronize(self.pool.device)  # on whatever stream it was used
        with self.pool.mapping_lock:
            if self._closed:
                return
            self._given_up = [given_up for given_up in self._given_up if given_up not in dead]
            needed = self.slots | self._slots_under(self._given_up) | self._leaving
            freed = self._free(self._range.slots.keys() - needed)
            if self._orphaned and not self._range.slots:
                self._closed = True
                self._range.close()
            if freed:
                self._on_freed(freed)
                self.pool.notify()
