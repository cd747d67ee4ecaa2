"""How many pages KV caches may have: a limit that its user moves, and a maximum that moves with the weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KVLimits:
    """Pages. Immutable: each change makes another one, so that a failed change is undone by keeping the old one."""

    maximum: int
    """The highest limit: the budget less what weights have."""
    limit: int
    """As last set; at the maximum it follows the maximum."""
    floor: int
    """The maximum that weights leave to caches at the least."""
    wanted: int = 0
    """Pages that weights wait for: new caches do not get them."""
    revision: int = 0
    shrinks: int = 0
    """How often caches that live were promised more than new ones."""

    @classmethod
    def of(cls, maximum: int) -> KVLimits:
        return cls(maximum, maximum, maximum)

    @property
    def open(self) -> int:
        """The limit for new caches."""
        return max(0, min(self.limit, self.maximum - self.wanted))

    @property
    def claimable(self) -> int:
        """Pages that weights may take from the maximum at most."""
        return self.maximum - min(self.floor, self.limit)

    def bound(self, born: int) -> int:
        """The limit for a cache begun after so many shrinks: one that lived before the last may grow past it."""
        return self.maximum if self.shrinks > born else self.open

    def is_stale(self, revision: int | None) -> bool:
        return revision is not None and revision <= self.revision

    def moved(self, limit: int, revision: int | None) -> KVLimits:
        """With another limit, under a revision (None: the next)."""
        return KVLimits(
            self.maximum,
            limit,
            self.floor,
            self.wanted,
            self.revision + 1 if revision is None else revision,
            self.shrinks + (limit < self.limit),
        )

    def lent(self, pages: int) -> KVLimits:
        """With more pages from the weights, or fewer (below zero)."""
        maximum = self.maximum + pages
        limit = maximum if self.limit == self.maximum else min(self.limit, maximum)
        return KVLimits(maximum, limit, self.floor, self.wanted, self.revision, self.shrinks)

    def settled(self, pages: int) -> KVLimits:
        """With weights of so many pages that have come to stay, or gone for good (below zero)."""
        floor = max(0, self.floor - pages)
        return KVLimits(self.maximum, self.limit, floor, self.wanted, self.revision, self.shrinks)

    def reserved(self, wanted: int) -> KVLimits:
        """With so many pages that weights wait for."""
        shrinks = self.shrinks + (wanted > self.wanted)
        return KVLimits(self.maximum, self.limit, self.floor, wanted, self.revision, shrinks)
