"""The pages that KV caches may have: a limit that its user moves, and a maximum that moves with the weights."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class KVLimits:
    """Pages. Immutable: each change makes another one, so that a failed change is undone by keeping the old one."""

    maximum: int
    """The highest limit: the budget less what weights have."""
    limit: int
    """As last set; at the maximum it follows the maximum."""
    floor: int
    """The maximum that weights leave to caches at the least."""
    held_back: int = 0
    """Pages that weights wait for: new caches do not get them."""
    revision: int = 0
    shrinks: int = 0
    """Counts how often caches that live were promised more than new ones."""

    @property
    def open(self) -> int:
        """The limit for new caches."""
        return max(0, min(self.limit, self.maximum - self.held_back))

    def with_limit(self, limit: int, revision: int | None) -> KVLimits:
        """Set the limit, under a revision (None: the next)."""
        revision = self.revision + 1 if revision is None else revision
        return replace(self, limit=limit, revision=revision, shrinks=self.shrinks + (limit < self.limit))

    def with_maximum(self, maximum: int) -> KVLimits:
        """Set the maximum; a limit at the old one follows."""
        limit = maximum if self.limit == self.maximum else min(self.limit, maximum)
        return replace(self, maximum=maximum, limit=limit)
