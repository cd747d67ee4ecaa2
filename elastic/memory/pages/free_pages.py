"""Pages that nobody has: those that make a huge page of the system stay together as long as others will do."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator
from operator import neg

_FEW = 16


class FreePages:
    """A set of pages, in whole blocks of so many from a multiple of their number on, and loose ones of other blocks.

    The lowest are taken first, and given back to the system last. Guarded by its user.
    """

    def __init__(self, block_pages: int, pages: int = 0) -> None:
        """Have so many pages, from 0 up."""
        blocks, rest = divmod(pages, block_pages)
        self._size = block_pages
        self._blocks = list(range(blocks - 1, -1, -1))  # the highest first, and so are loose pages
        self._loose = list(range(pages - 1, pages - rest - 1, -1))
        self._loose_of = Counter({blocks: rest})  # block -> its loose pages

    def __len__(self) -> int:
        return self.whole + len(self._loose)

    def __iter__(self) -> Iterator[int]:
        yield from self._pages(self._blocks)
        yield from self._loose

    @property
    def whole(self) -> int:
        """Pages of whole blocks."""
        return len(self._blocks) * self._size

    def add(self, pages: Iterable[int]) -> None:
        """Put pages in that are not in it."""
        new = list(pages)
        if self._size == 1:
            _put(self._blocks, new)
            return
        touched = Counter(page // self._size for page in new)
        self._loose_of.update(touched)
        complete = {block for block in touched if self._loose_of[block] == self._size}
        _put(self._loose, new)
        if complete:
            self._loose = [page for page in self._loose if page // self._size not in complete]
            self._loose_of = Counter({block: n for block, n in self._loose_of.items() if n and block not in complete})
            _put(self._blocks, list(complete))

    def take(self, count: int) -> list[int]:
        """Take so many, of which there are as many: loose ones first."""
        if self._size == 1:
            return self.take_whole(count)
        while count > len(self._loose):
            self._break(self._blocks.pop())
        return self._take_loose(slice(len(self._loose) - count, None))[::-1]

    def take_whole(self, count: int) -> list[int]:
        """Take whole blocks, as many as there are of at most so many pages."""
        kept = max(0, len(self._blocks) - count // self._size)
        blocks = self._blocks[kept:][::-1]
        del self._blocks[kept:]
        return self._pages(blocks)

    def take_last(self, count: int) -> list[int]:
        """Take so many, of which there are as many, as the system is to have them back: whole blocks first."""
        number = count // self._size
        blocks = self._blocks[:number]
        del self._blocks[:number]
        rest = count - len(blocks) * self._size
        while rest > len(self._loose):
            self._break(self._blocks.pop(0))
        return self._pages(blocks) + self._take_loose(slice(rest))

    def _pages(self, blocks: Iterable[int]) -> list[int]:
        return [page for block in blocks for page in range(block * self._size, (block + 1) * self._size)]

    def _break(self, block: int) -> None:
        self._loose_of[block] = self._size
        _put(self._loose, self._pages([block]))

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
