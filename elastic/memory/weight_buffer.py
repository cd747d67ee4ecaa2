"""A block: the parameters of one layer in pages of one place, side by side in one range of addresses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable

import torch

from elastic.errors import ElasticError
from elastic.memory.backends.base import runs
from elastic.memory.background import janitor
from elastic.memory.mapped_storage import MappedStorage
from elastic.memory.page_pool import PagePool
from elastic.memory.rate_limit import RateLimiter
from elastic.memory.virtual_range import VirtualRange
from elastic.memory.weight_layout import LayerLayout, pages_under

logger = logging.getLogger(__name__)
RETAINED = "retained"
PAGES_AT_ONCE = 64
"""Made before one hold of the tenants' lock, under which all that are ready are mapped."""


class WeightBuffer:
    """Room for one layer. Thread-safe, under the lock that all tenants of a page pool share.

    `fill` (pages, owned) and `rest` (pages free, still mapped, lost one by one to whoever takes them) are a pair;
    `show` makes the parameters, each a storage of its own, and `hide` lets go of them. A block that a tensor outside
    still shows is given up with `abandon`: its pages are `retained` until that tensor dies. `narrow` gives up some
    parameters only. `slots`: the pages to be filled, by number; None: all.
    """

    def __init__(self, pool: PagePool, nbytes: int, *, slots: Collection[int] | None = None) -> None:
        self.pool = pool
        self._slots = set(range(pool.pages_for(nbytes)) if slots is None else slots)
        self._range = VirtualRange(pool, max(1, pool.pages_for(nbytes)))
        self._spans: dict[str, tuple[int, MappedStorage]] = {}  # parameter -> offset, span
        self._shown: dict[str, torch.Tensor] = {}
        self._leaving: list[tuple[int, MappedStorage]] = []  # given up, but tensors outside may show them
        self._abandoned = False
        self._closed = False
        self._on_freed: Callable[[int], object] = lambda pages: None

    @property
    def pages(self) -> int:
        """Pages that it needs: of all its bytes, or of the slots it was made for."""
        return len(self._slots)

    def allocate(self, owner: str, pace: RateLimiter | None = None) -> None:
        """Have every page mapped and owned, made at a pace where none is. Raises `CapacityError`; then it rests."""
        try:
            with self.pool.mapping_lock:
                idle = list(self._range.slots.values())
                self.pool.reuse(idle, owner, self)
            for first, count in runs(sorted(self._slots - self._range.slots.keys())):
                self._map_all(first, first + count, owner, pace)
        except BaseException:
            self.make_reclaimable()
            raise

    def make_reclaimable(self) -> None:
        """The pages are free: whoever needs some takes them out of this block."""
        assert not self._spans, "hide first"
        with self.pool.mapping_lock:
            owned = self.pool.owned_of(self._range.slots.values())
            if owned:
                self.pool.mark_reclaimable(owned, self)
                self.pool.notify()

    def reclaim(self, count: int) -> int:
        """Unmap up to `count` idle pages, the last ones first."""
        with self.pool.mapping_lock:
            gone = 0
            if self.pool.owns_any(self._range.slots.values()):
                return 0  # filled again meanwhile
            for first, length in reversed(self._range.mapped_runs()):
                part = min(length, count - gone)
                if part:
                    self.pool.free(self._range.unmap(first + length - part, part))
                    gone += part
            if not self._range.slots:
                self.pool.unregister_holder(self)
            return gone

    def show(self, layout: LayerLayout) -> dict[str, torch.Tensor]:
        """The parameters by name, views of the block in the checkpoint's shapes. The same ones until `hide`."""
        for name, parameter in layout.parameters.items():
            if name not in self._spans:
                span = MappedStorage(self._range.address + parameter.offset, parameter.nbytes, self._device, self._note)
                self._spans[name] = parameter.offset, span
                self._shown[name] = parameter.show(span.tensor(parameter.dtype))
        return {name: self._shown[name] for name in layout.parameters}

    def hide(self) -> bool:
        """Let go of the parameters; returns whether no tensor outside shows one."""
        self._shown.clear()
        for _, span in self._spans.values():
            span.drop()
        if any(span.alive for _, span in [*self._spans.values(), *self._leaving]):
            return False
        self._spans.clear()
        return True

    def orphan(self, on_freed: Callable[[int], object]) -> int:
        """Give up a block that tensors outside still show.

        Returns the pages freed now; the others are `retained`, and `on_freed` hears how many of them become free when
        the last such tensor dies.
        """
        self._abandoned = True
        return self.shrink(list(self._spans), on_freed)

    def shrink(self, names: Iterable[str], on_freed: Callable[[int], object]) -> int:
        """Give up some of the parameters that are shown, and the pages that no other one lies in; as `abandon`."""
        with self.pool.mapping_lock:
            self._on_freed = on_freed
            for name in names:
                self._leaving.append(self._spans.pop(name))
                self._leaving[-1][1].drop()
                self._shown.pop(name, None)
            self._slots = self._under(self._spans.values())
            shown = self._shown_outside()
            self.pool.reassign((self._range.slots[slot] for slot in shown), RETAINED)
            freed = self._drop(self._range.slots.keys() - self._slots - shown)
        janitor.submit(self._settle)  # for what died in between
        return freed

    def close(self) -> None:
        """Give pages and addresses back; with tensors outside, when the last of them dies. Can be called twice.

        What the driver refuses to unmap stays at rest: free, and taken by whoever needs it.
        """
        with self.pool.mapping_lock:
            if self._closed:
                return
            if not self.hide():
                if not self._abandoned:
                    self.orphan(lambda pages: None)
                return
            self.make_reclaimable()
            try:
                self.reclaim(self.pages)
                self._range.close()
                self._closed = True
            except ElasticError as error:
                logger.warning("pages of %s could not be given back yet: %s", self.pool.name, str(error))

    def _map_all(self, start: int, stop: int, owner: str, pace: RateLimiter | None) -> None:
        """In parts, so that a KV cache that grows meanwhile waits neither long nor for pages that are being made."""
        while start < stop:
            made = self.pool.make_ready(min(PAGES_AT_ONCE, stop - start))
            if pace is not None:
                pace.acquire(made * self.pool.page_bytes)
            count = min(stop - start, max(PAGES_AT_ONCE, self.pool.cached_pages))
            self._map(start, count, owner)
            start += count

    def _map(self, slot: int, count: int, owner: str) -> None:
        with self.pool.mapping_lock:
            pages = self.pool.allocate(owner, count)
            try:
                self._range.map(slot, pages)
            except BaseException:
                self.pool.free(pages)
                raise

    def _shown_outside(self) -> set[int]:
        """Slots of what was given up that tensors outside still show, and nothing else of the block needs."""
        self._leaving = [(at, span) for at, span in self._leaving if span.alive]
        return self._under(self._leaving) - self._slots

    def _under(self, spans: Iterable[tuple[int, MappedStorage]]) -> set[int]:
        return {slot for at, span in spans for slot in pages_under(at, span.nbytes, self.pool.page_bytes)}

    def _drop(self, slots: Iterable[int]) -> int:
        """Unmap slots and give their pages back. What the driver refuses now is tried again when a tensor dies."""
        dropped = 0
        try:
            for first, count in runs(sorted(slots)):
                self.pool.free(self._range.unmap(first, count))
                dropped += count
        except ElasticError as error:
            logger.warning("pages of %s could not be given back yet: %s", self.pool.name, str(error))
        return dropped

    def _note(self) -> None:
        """Called by finalizers, so from anywhere: takes no lock."""
        if self._leaving:
            janitor.submit(self._settle)

    def _settle(self) -> None:
        """Give back the pages of what was given up and no tensor shows any more."""
        with self.pool.mapping_lock:
            if self._closed:
                return
            freed = self._drop(self._range.slots.keys() - self._slots - self._shown_outside())
            if self._abandoned and not self._range.slots:
                self._closed = True
                self._range.close()
            if freed:
                self._on_freed(freed)
                self.pool.notify()

    @property
    def _device(self) -> torch.device:
        return self.pool.backend.device
