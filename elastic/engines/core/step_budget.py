"""How many tokens a step may have: a number of them, or as many as cost the same in every step.

Steps are filled in order: sequences that decode first, then prompts. So where to cut the queue into microbatches is a
number of tokens. In a pipeline steps that cost the same keep its stages from waiting for each other (KunServe,
section 4.3): a chunk late in a long prompt costs more than one of the same length early in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from elastic.errors import require
from elastic.planning.pipeline.chunk_cost import Chunk, ChunkCost

MOST_CHUNKS = 64
"""How far the queue is looked through."""
SHORT = 64
"""Tokens of a short prompt, or as many as a step has at the least: in none are tokens cheaper."""


SHORTER = 4
"""By how much fewer tokens of prompts a step has whose end somebody waits for."""


class StepBudget(Protocol):
    """Asked once for each step."""

    def tokens(self, decoding: Iterable[int], queue: Iterable[Chunk]) -> int:
        """Return the most tokens of a step.

        `decoding` has the earlier tokens of each sequence that decodes, `queue` what is left of the prompts, in order.
        """


@dataclass(frozen=True)
class TokenBudget:
    """The same number for every step, as Sarathi has it."""

    most: int

    def tokens(self, decoding: Iterable[int], queue: Iterable[Chunk]) -> int:
        """Return it."""
        return self.most


@dataclass
class CostBudget:
    """Steps of equal cost: that of the `least` dearest tokens which are in the queue, those at the end of a prompt, or
    of `usual` ones in prompts of `SHORT`, if that is more (None: it is not asked).

    So no step of the queue has fewer than `least` tokens while there are more, and none costs more than another; what
    the decoding sequences of a step cost is of its share. `most` bounds the tokens of a step in any case. With it as
    `usual`, short prompts are cut about as by tokens: smaller steps would read weights more often. It is KunServe's
    lookahead (section 4.3, figures 10 and 11), computed step by step: a plan of all batches would be one of a queue
    that has changed by the next step. What the queue of a moment makes the share is the share until all that
    was in it is computed, or something dearer comes: else steps would become cheaper behind each long prompt.
    """

    cost: ChunkCost
    least: int
    most: int
    usual: int | None = None
    _share_s: float = field(default=0.0, init=False, repr=False, compare=False)
    _looked_at: frozenset[str] = field(default=frozenset(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require(1 <= self.least <= self.most, "least", self.least, f"from 1 to most={self.most}")
        within = self.usual is None or self.least <= self.usual <= self.most
        require(within, "usual", self.usual, f"from least={self.least} to most={self.most}")

    def tokens(self, decoding: Iterable[int], queue: Iterable[Chunk]) -> int:
        """Return the tokens that cost a step's share."""
        ahead = list(islice(queue, MOST_CHUNKS))
        if not ahead:
            return self.most
        decodes = [Chunk("", start, 1) for start in decoding]
        left_s = self._share(ahead) - self.cost.batch(decodes)
        prompts = self._within(ahead, left_s, self.cost.shared if decodes else 0.0)
        return min(self.most, len(decodes) + max(self.least, prompts))

    def _share(self, ahead: Sequence[Chunk]) -> float:
        """Return the seconds of a step, by what is in the queue, or was and has left something in it."""
        names = frozenset(chunk.request for chunk in ahead)
        share_s = max(self.cost(chunk.cut(max(0, chunk.tokens - self.least))[1]) for chunk in ahead)
        if self.usual is not None:
            size = min(self.least, SHORT)
            share_s = max(share_s, self.cost.batch([Chunk("", 0, size)] * (self.usual // size)))
        if share_s > self._share_s or self._looked_at.isdisjoint(names):
            self._share_s, self._looked_at = share_s, names
        return self._share_s

    def _within(self, queue: Iterable[Chunk], seconds: float, paid: float) -> int:
        """Count the first tokens of a queue that cost so much; of what a batch pays once so much is paid already."""
        tokens = 0
        for chunk in queue:
            price = self.cost(chunk) - paid
            if price > seconds:
                return tokens + self.cost.tokens_within(chunk, seconds + paid)
            tokens, seconds, paid = tokens + chunk.tokens, seconds - price, self.cost.shared
        return tokens


def short_step(tokens: int, decoding: int) -> int:
    """Return the most tokens of a step whose end somebody waits for: all that decode, and fewer of prompts."""
    prompts = tokens - decoding
    return tokens if prompts <= SHORT else decoding + max(SHORT, prompts // SHORTER)


@dataclass(frozen=True)
class PathBudget:
    """One budget while an engine computes all of its layers itself, another one while other ranks compute some."""

    alone: StepBudget
    pipelined: StepBudget
    is_pipelined: Callable[[], bool]

    def tokens(self, decoding: Iterable[int], queue: Iterable[Chunk]) -> int:
        """Return the most tokens of a step, by the one or the other."""
        return (self.pipelined if self.is_pipelined() else self.alone).tokens(decoding, queue)
