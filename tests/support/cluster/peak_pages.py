"""The pages of a place that somebody owns, by its ledger, and the most that there were meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from elastic.memory.pages.page_pool import PagePool


@dataclass
class Owned:
    """Of one place."""

    before: int
    most: int
    after: int = 0

    @property
    def transient(self) -> int:
        """Pages beyond those that there were before, and those that there are afterwards."""
        return self.most - max(self.before, self.after)


@contextmanager
def owned_pages(pool: PagePool) -> Iterator[Owned]:
    """Count the pages of a pool while something is done."""
    count = Owned(len(pool._owner), len(pool._owner))
    assign = pool._assign

    def noted(pages: Sequence[int], owner: str) -> None:
        assign(pages, owner)
        count.most = max(count.most, len(pool._owner))

    pool._assign = noted  # type: ignore[method-assign]
    try:
        yield count
    finally:
        del pool._assign  # type: ignore[attr-defined]
        count.after = len(pool._owner)
