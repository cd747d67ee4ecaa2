"""The staging reserve: pages kept back so that a layer can be swapped when all others are taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from elastic.errors import CapacityError
from elastic.hooks.actions import Lender
from elastic.memory.pool import PagePool

OWNER = "staging"


class Reserve:
    """Up to `pages` pages of a place, counted in the ledger as `staging`."""

    def __init__(self, pool: PagePool, pages: int) -> None:
        self.pool = pool
        self.pages = pages
        self.missing = pages

    @property
    def ready(self) -> int:
        """Pages that are there."""
        return self.pages - self.missing

    def fill(self) -> None:
        """Have all of it. Raises `CapacityError`."""
        self.pool.hold(OWNER, self.missing)
        self.missing = 0

    def refill(self, pages: int) -> int:
        """Take back what is missing, out of `pages` that have just come free; returns how many are left over.

        Where others were faster, nothing is taken: the next pages that come free are.
        """
        taken = max(0, min(pages, self.missing))
        if taken:
            try:
                self.pool.hold(OWNER, taken)
                self.missing -= taken
            except CapacityError:
                return pages
        return pages - taken

    @contextmanager
    def opened(self, pages: int) -> Iterator[None]:
        """Within: `pages` of it are free, and nobody else gets them; what is not taken by then returns."""
        with self.pool.tenants:
            self._release(pages)
            try:
                yield
            except BaseException:
                self.refill(pages)
                raise

    def close(self) -> None:
        """Give all of it back."""
        self._release(self.ready)
        self.pages = self.missing = 0

    def _release(self, pages: int) -> None:
        self.pool.let_go(OWNER, pages)
        self.missing += pages


class ReservingLender:
    """A lender that refills the reserves first out of what weights give up."""

    def __init__(self, lender: Lender, reserves: Mapping[str, Reserve]) -> None:
        self._lender = lender
        self.reserves = dict(reserves)
        self.claim, self.reserve, self.room = lender.claim, lender.reserve, lender.room
        self.could_claim, self.settle = lender.could_claim, lender.settle

    def lend(self, place: str, pages: int) -> None:
        """Reserves and caches may count on these pages from now on."""
        reserve = self.reserves.get(place)
        self._lender.lend(place, reserve.refill(pages) if reserve else pages)
