"""Pages that nobody has: those that make a huge page of the system stay together as long as others will do."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator
from operator import neg

_FEW = 16


class FreePages:
    """A set of pages, in whole huge pages of so many from a multiple of their number on, and loose ones of others.

    The lowest are taken first, and given back to the system last. Guarded by its user.
    """

    def __init__(self, pages_per_huge_page: int, pages: int = 0) -> None:
        """Have so many pages, from 0 up."""
        huge_pages, rest = divmod(pages, pages_per_huge_page)
        self._size = pages_per_huge_page
        self._huge_pages = list(range(huge_pages - 1, -1, -1))  # the highest first, and so are loose pages
        self._loose = list(range(pages - 1, pages - rest - 1, -1))
        self._loose_of = Counter({huge_pages: rest})  # huge page -> its loose pages

    def __len__(self) -> int:
        return self.whole + len(self._loose)

    def __iter__(self) -> Iterator[int]:
        yield from self._pages(self._huge_pages)
        yield from self._loose

    @property
    def whole(self) -> int:
        """Pages of whole huge pages."""
        return len(self._huge_pages) * self._size

    def add(self, pages: Iterable[int]) -> None:
        """Put pages in that are not in it."""
        new = list(pages)
        touched = Counter(page // self._size for page in new)
        self._loose_of.update(touched)
        complete = {huge_page for huge_page in touched if self._loose_of[huge_page] == self._size}
        _put(self._loose, new)
        if complete:
            self._loose = [page for page in self._loose if page // self._size not in complete]
            self._loose_of = Counter(
                {number: n for number, n in self._loose_of.items() if n and number not in complete}
            )
            _put(self._huge_pages, list(complete))

    def take(self, count: int) -> list[int]:
        """Take so many, of which there are as many: loose ones first."""
        lacking = max(0, -(-(count - len(self._loose)) // self._size))
        self._break(slice(len(self._huge_pages) - lacking, None))
        return self._take_loose(slice(len(self._loose) - count, None))[::-1]

    def take_whole(self, count: int) -> list[int]:
        """Take whole huge pages, as many as there are of at most so many pages."""
        kept = max(0, len(self._huge_pages) - count // self._size)
        huge_pages = self._huge_pages[kept:][::-1]
        del self._huge_pages[kept:]
        return self._pages(huge_pages)

    def take_last(self, count: int) -> list[int]:
        """Take so many, of which there are as many, as the system is to have them back: whole huge pages first."""
        number = count // self._size
        huge_pages = self._huge_pages[:number]
        del self._huge_pages[:number]
        rest = count - len(huge_pages) * self._size
        self._break(slice(max(0, -(-(rest - len(self._loose)) // self._size))))
        return self._pages(huge_pages) + self._take_loose(slice(rest))

    def _pages(self, huge_pages: Iterable[int]) -> list[int]:
        starts = (huge_page * self._size for huge_page in huge_pages)
        return [page for start in starts for page in range(start, start + self._size)]

    def _break(self, part: slice) -> None:
        """Have the pages of some huge pages be loose."""
        broken = self._huge_pages[part]
        del self._huge_pages[part]
        self._loose_of.update(dict.fromkeys(broken, self._size))
        _put(self._loose, self._pages(broken))

    def _take_loose(self, part: slice) -> list[int]:
        pages = self._loose[part]
        del self._loose[part]
        self._loose_of.subtract(page // self._size for page in pages)
        return pages


def _put(numbers: list[int], new: list[int]) -> None:
    """Put numbers in a list whose highest come first."""
    if len(new) <= _FEW:
        for number in new:
            insort(numbers, number, key=neg)
    else:
        numbers += new
        numbers.sort(reverse=True)
