"""Steps that are cut by a plan of all that is in the queue, for the ranks of `microbatches.py`.

No engine has them: its own steps are cut one at a time (`CostBudget`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from elastic.planning.pipeline.chunk_cost import Chunk, ChunkCost
from support.planning.halving import Batch, cut_evenly, halve

Plan = Callable[[Sequence[Chunk], ChunkCost, int], tuple[Batch, ...]]
"""By what a queue costs, for steps of so many tokens."""


def by_halves(queue: Sequence[Chunk], cost: ChunkCost, tokens: int) -> tuple[Batch, ...]:
    """Halve it until a batch would have less than a fourth of the tokens, as figure 11 does."""
    return halve(queue, cost, max(1, tokens // 4))


def by_number(queue: Sequence[Chunk], cost: ChunkCost, tokens: int) -> tuple[Batch, ...]:
    """Cut it into as many batches of equal cost as there would be of so many tokens each."""
    return cut_evenly(queue, cost, -(-sum(chunk.tokens for chunk in queue) // tokens))


@dataclass
class PlannedSteps:
    """A `StepBudget`: the queue is planned anew when a request is new in it, and when the plan has come to its end.

    So batches that are in flight together, each of which sees the prompts it has begun and those that wait, have steps
    of one plan.
    """

    plan: Plan
    cost: ChunkCost
    size: int
    """Tokens of a step in the mean, or four times what one has at least: see the plan."""
    most: int
    """Tokens of a step."""
    _left: list[int] = field(default_factory=list, init=False, repr=False)
    _planned: set[str] = field(default_factory=set, init=False, repr=False)

    def tokens(self, decoding: Iterable[int], queue: Iterable[Chunk]) -> int:
        """Return the tokens of the next step of the plan, and one for each sequence that decodes."""
        ahead = list(queue)
        if not ahead:
            return self.most
        names = {chunk.request for chunk in ahead}
        if not self._left or not names <= self._planned:
            batches = self.plan(ahead, self.cost, self.size)
            self._left = [sum(chunk.tokens for chunk in batch) for batch in batches]
            self._planned |= names
        decodes = sum(1 for _ in decoding)
        taken = max(1, min(self._left[0], self.most - decodes))
        self._left[0] -= taken
        if not self._left[0]:
            del self._left[0]
        return decodes + taken
