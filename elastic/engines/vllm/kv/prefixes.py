"""Requests share the keys and values of a common prefix only where the present weights computed them.

vLLM finds cached blocks by hashes of their tokens. Here the weights are in them, too, by vLLM's cache salt, so that
another connector beside ours keeps them apart as well.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Weights = tuple[int, bytes]
"""Of one rank: how often layers got other variants, and a name for those that they have, empty for the full ones."""


@dataclass
class _Hashed:
    """A request that lives."""

    request: Any
    """vLLM's, with `cache_salt`, `block_hashes` and `update_block_hashes()`, which appends those that are missing."""
    salt: str | None
    """That it came with."""
    weights: str = ""
    """What is in its hashes; empty: nothing, since all weights are full."""
    entered: bool = False
    """Whether some of its blocks were computed, or are about to be."""

    def hash_for(self, weights: str) -> None:
        self.weights = weights
        self.request.cache_salt = f"{self.salt or ''}#elastic-{weights}" if weights else self.salt
        self.request.block_hashes.clear()
        self.request.update_block_hashes()


class PrefixSharing:
    """The weights that the hashes of each request stand for."""

    def __init__(self) -> None:
        self._seen: Sequence[Weights] | None = None
        self._name = ""
        self._requests: dict[str, _Hashed] = {}

    def arrive(self, request: Any) -> None:
        """Have a new request share what the present weights compute."""
        hashed = self._requests[request.request_id] = _Hashed(request, request.cache_salt)
        if self._name:
            hashed.hash_for(self._name)

    def may_look_up(self, request: str) -> bool:
        """Whether a request without blocks has looked for its prefix by the present weights; if not, it now can."""
        hashed = self._requests[request]
        if hashed.weights == self._name:
            return True
        hashed.hash_for(self._name)
        hashed.entered = False
        return False

    def enter(self, request: str) -> None:
        """Note that a request has blocks."""
        self._requests[request].entered = True

    def leave(self, request: str) -> None:
        """Forget a request. Can be called twice."""
        self._requests.pop(request, None)

    def change(self, ranks: Sequence[Weights]) -> bool:
        """Note what the ranks compute with; return whether it is something else, so that nothing cached may be found.

        Requests that have blocks go on with them, and share what comes behind with nobody.
        """
        if ranks == self._seen:
            return False
        before, self._seen = self._seen, ranks
        self._name = "".join(name.hex() for _, name in ranks)
        if before is None:
            return False
        for hashed in self._requests.values():
            if hashed.entered:
                hashed.hash_for(uuid.uuid4().hex)
        return True
