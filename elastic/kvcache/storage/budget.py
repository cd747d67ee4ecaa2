"""The share of a place that weights give to KV caches and take back."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastic.kvcache.storage.pool import RETAINED, KVPool


@dataclass(frozen=True)
class WeightsShare:
    """Moves the maximum of one KV pool with the weights beside it; nothing cached is discarded. Thread-safe. Pages."""

    kv: KVPool

    def give_to_cache(self, pages: int) -> None:
        """Let caches have pages that weights gave up. A limit at the maximum rises with it."""
        kv = self.kv
        with kv.lock:
            if not kv.closed:
                kv.limits = kv.limits.with_maximum(kv.limits.maximum + pages)

    def take_from_cache(self, pages: int, held_back: int | None = None) -> bool:
        """Take pages back for weights if caches can do without; return whether they do. If not, nothing has changed.

        Caches of other models on the place keep what their live requests need to end. `held_back`: what weights still
        wait for then; None: as much as before.
        """
        kv = self.kv
        with kv.lock:
            shortfall = self.shortfall(pages)
            if shortfall > 0 and kv.reclaimer.trim_live() < shortfall:
                return False
            if kv.pool.claimed(but=kv) > 0 and pages > kv.usage.beside_others(kv.pool, kv, growing=False):
                return False
            held_back = kv.limits.held_back if held_back is None else held_back
            kv.limits = replace(kv.limits.with_maximum(kv.limits.maximum - pages), held_back=held_back)
            kv.reclaimer.tidy(lambda: kv.reclaimer.fit_mapped(kv.unreserved))  # what it frees is for the weights
            return True

    def shortfall(self, pages: int) -> int:
        """Count the pages by which live caches exceed what they may hold without `pages`."""
        kv = self.kv
        with kv.lock:
            kv.retire_ended()
            return max(0, kv.usage.used + kv.usage.promised() + pages - kv.limits.maximum)

    def record_resident(self, pages: int) -> None:
        """Note that weights of so many pages have come to stay, or gone for good (below zero)."""
        with self.kv.lock:
            limits = self.kv.limits
            self.kv.limits = replace(limits, floor=max(0, limits.floor - pages))

    def claimable(self) -> int:
        """Count what weights may take at most: what they gave up, and what the limit keeps from caches."""
        with self.kv.lock:
            limits = self.kv.limits
            return limits.maximum - min(limits.floor, limits.limit) + self.kv.pool.pages_of(RETAINED)

    def hold_back(self, pages: int) -> None:
        """Keep pages that weights wait for from new caches; those that live may go on. 0: weights wait no more."""
        kv = self.kv
        with kv.lock:
            before = kv.limits.held_back
            kv.limits = replace(kv.limits, held_back=pages, shrinks=kv.limits.shrinks + (pages > before))
            kv.reclaimer.tidy(lambda: kv.reclaimer.fit(kv.unreserved))
            if pages < before:
                kv.pool.notify()
