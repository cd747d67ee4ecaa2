"""Admission by promise: a request enters only when all that live can still get every block they may ever need.

So none is preempted, and no prompt is computed twice (law 2). The bound is the sum of what each may come to hold: a
prefix that requests share counts for each of them. One that found no room may be overtaken by smaller ones, but not
for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PATIENCE = 16
"""Requests that may overtake the one that waits longest; then its blocks are set aside until it is in."""


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
    Not `binding`: vLLM admits requests alone, and preempts when it must; what they need is known.
    """

    def __init__(
        self, groups: Sequence[GroupDemand], *, longest: int, lookahead: int = 0, binding: bool = True
    ) -> None:
        self._groups = tuple(groups)
        self._longest = longest
        self._lookahead = lookahead
        self._promised: dict[str, int] = {}
        self.waiting: dict[str, int] = {}
        """Those that found no room, the first of them first, and the blocks that they need."""
        self._overtaken = 0  # how often the first of them was
        self.binding = binding
        self.total = 0
        self.largest = self.demand(longest)
        """Blocks of one request that is as long as any may be."""

    @property
    def alone(self) -> int:
        """Blocks that there should be for one request, whatever the limit: the first that waits, where none lives.

        Where promises do not bind, there should be those of any that lives: it may be preempted until it has them.
        """
        if self._promised:
            return 0 if self.binding else max(self._promised.values())
        return next(iter(self.waiting.values()), 0)

    def demand(self, tokens: int) -> int:
        """Count the blocks that a request of so many tokens, prompt and output, may come to hold."""
        tokens, blocks = min(tokens + self._lookahead, self._longest), 0
        for group in self._groups:
            blocks += group.blocks(tokens)
        return blocks

    def may_enter(self, request: str, tokens: int, room: int) -> bool:
        """Whether a request may enter where there is room for so many blocks in all. One that entered before may."""
        demand, first = self.demand(tokens), next(iter(self.waiting), request)
        aside = self.waiting[first] if first != request and self._overtaken >= PATIENCE else 0
        if request in self._promised or self.total + demand + aside <= room:
            return True
        self.waiting.setdefault(request, demand)
        return not self.binding

    def enter(self, request: str, tokens: int) -> None:
        """Promise a request its blocks; once more: as many as it needs now."""
        self.leave(request)
        self._promised[request] = self.demand(tokens)
        self.total += self._promised[request]
        self._overtaken += bool(self.waiting)

    def leave(self, request: str) -> None:
        """Take a promise back. Can be called twice."""
        self.total -= self._promised.pop(request, 0)
        if request == next(iter(self.waiting), None):
            self._overtaken = 0
        self.waiting.pop(request, None)
