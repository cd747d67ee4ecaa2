"""Admission by promise: a request enters only when all that live can still get every block they may ever need.

So none is preempted, and no prompt is computed twice (law 2). The bound is the sum of what each may come to hold: a
prefix that requests share counts for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GroupDemand:
    """How the blocks that one request holds in a group of layers grow with its tokens."""

    block_tokens: int
    most_blocks: int | None = None
    """Held at once at the most, where old tokens are dropped (sliding windows, states)."""
    extra_blocks: int = 0
    """Held beside those for tokens, as by states with speculative decoding."""

    def blocks(self, tokens: int) -> int:
        """Count the blocks that a request of so many tokens may hold."""
        needed = -(-tokens // self.block_tokens)
        return (needed if self.most_blocks is None else min(needed, self.most_blocks)) + self.extra_blocks


class PromiseLedger:
    """The blocks promised to each request that lives.

    `longest`: tokens that a request may have at all; `lookahead`: slots beyond its tokens that a step may ask for.
    """

    def __init__(self, groups: Sequence[GroupDemand], *, longest: int, lookahead: int = 0) -> None:
        self._groups = tuple(groups)
        self._longest = longest
        self._lookahead = lookahead
        self._promised: dict[str, int] = {}
        self._turned_away: tuple[str, int] | None = None  # the last request, and the blocks that it needs
        self.total = 0

    @property
    def admitted(self) -> int:
        """Requests that live."""
        return len(self._promised)

    @property
    def waiting(self) -> int:
        """Blocks that are needed by the request that was turned away last; 0 once any has entered, or it left."""
        return self._turned_away[1] if self._turned_away else 0

    @property
    def largest(self) -> int:
        """Blocks of one request that is as long as any may be."""
        return self.demand(self._longest)

    def demand(self, tokens: int) -> int:
        """Count the blocks that a request of so many tokens, prompt and output, may come to hold."""
        tokens = min(tokens + self._lookahead, self._longest)
        return sum(group.blocks(tokens) for group in self._groups)

    def may_enter(self, request: str, tokens: int, room: int) -> bool:
        """Whether a request may enter where there is room for so many blocks in all. One that entered before may."""
        if request in self._promised or self.total + self.demand(tokens) <= room:
            return True
        self._turned_away = request, self.demand(tokens)
        return False

    def enter(self, request: str, tokens: int) -> None:
        """Promise a request its blocks; once more: as many as it needs now."""
        self.leave(request)
        self._promised[request] = self.demand(tokens)
        self.total += self._promised[request]
        self._turned_away = None

    def leave(self, request: str) -> None:
        """Take a promise back. Can be called twice."""
        self.total -= self._promised.pop(request, 0)
        if self._turned_away and self._turned_away[0] == request:
            self._turned_away = None
