"""The staging reserve: pages kept back so that a layer can be swapped when all others are taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from elastic.errors import CapacityError
from elastic.memory.page_pool import PagePool

OWNER = "staging"


class StagingReserve:
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
        self.pool.reserve(OWNER, self.missing)
        self.missing = 0

    def refill(self, pages: int) -> int:
        """Take back what is missing, out of `pages` that have just come free; returns how many are left over.

        Where others were faster, nothing is taken: the next pages that come free are.
        """
        taken = max(0, min(pages, self.missing))
        if taken:
            try:
                self.pool.reserve(OWNER, taken)
                self.missing -= taken
            except CapacityError:
                return pages
        return pages - taken

    @contextmanager
    def opened(self, pages: int) -> Iterator[None]:
        """Within: `pages` of it are free, and nobody else gets them; what is not taken by then returns."""
        with self.pool.mapping_lock:
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
        self.pool.unreserve(OWNER, pages)
        self.missing += pages
