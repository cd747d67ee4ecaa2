"""The pages that a layer needs by the parts of it that are kept: a page goes when nothing that lies in it is kept."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from itertools import chain


@dataclass(frozen=True)
class ShardPages:
    """The pages of one layer, by number from the beginning of its range. Two parts may have a page in common."""

    common: tuple[range, ...]
    """Of what is needed with any part: all that is not cut."""
    parts: tuple[tuple[range, ...], ...]
    """Of what each part needs besides."""

    def pages(self, parts: Collection[int]) -> int:
        """Count the pages of a layer with these parts; without any, it has none. Plans ask again and again."""
        key = frozenset(parts)
        count = self._counts.get(key)
        if count is None:
            count = self._counts[key] = self._count(key)
        return count

    def numbers(self, parts: Collection[int]) -> set[int]:
        """Return the numbers of those pages."""
        return {page for run in self._runs(parts) for page in run}

    @cached_property
    def _counts(self) -> dict[frozenset[int], int]:
        """Pages by parts, as far as they were counted."""
        return {}

    def _count(self, parts: Collection[int]) -> int:
        count = reached = 0
        for run in sorted(self._runs(parts), key=lambda run: run.start):
            count += max(0, run.stop - max(reached, run.start))
            reached = max(reached, run.stop)
        return count

    def _runs(self, parts: Collection[int]) -> Collection[range]:
        return (*self.common, *chain.from_iterable(self.parts[part] for part in parts)) if parts else ()
