"""Whether ranks of one host have budgets that it can hold together: each by itself is held against all of it."""

from __future__ import annotations

from collections.abc import Mapping

from elastic.cluster.control.messages import RankPlace
from elastic.errors import ConfigError

Claims = Mapping[tuple[str, str], RankPlace]
"""Places of ranks of one host, by what names the process and by their own name: in one process this is one place."""


def require_memory_together(who: str, claims: Claims) -> None:
    """Raise `ConfigError` where budgets are more together than there is of some memory. `who` cannot start then."""
    for memory in dict.fromkeys(place.memory for place in claims.values()):
        places = [place for place in claims.values() if place.memory == memory]
        budget = sum(place.budget_bytes or 0 for place in places)
        total = min(place.total_bytes for place in places)
        if budget > total:
            raise ConfigError(
                f"{who}: the {len(places)} places of ranks in this memory ({memory}) would have budgets of "
                f"{budget:,} bytes together; there are {total:,}: give them less, or none to have it chosen"
            )
