"""Seconds of a layer for batches, fitted to measurements: what `ChunkCost` is to schedulers, with more terms.

Products with few tokens take as long as weights take to be read, and in a variant to be expanded; with more tokens
they grow, not always in proportion: so their seconds are a line with bends. Steps of one token read keys and values,
and compute little with them; prompts compute much with what they read: so these are two terms.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any, Self

from elastic.errors import ConfigError
from elastic.planning.least_squares import not_negative
from elastic.planning.pipeline.chunk_cost import BatchTiming, Chunk


@dataclass(frozen=True)
class LayerCost:
    """Seconds of one layer, or of what is around the layers. No term is below zero."""

    matrices: tuple[tuple[int, float], ...]
    """(new tokens of a batch, seconds of its products with weights), ascending; linear in between, and beyond."""
    chunk: float
    """For each chunk after the first."""
    pair: float
    """For each pair of tokens of which one is new, in a prompt, and the other one is read for its chunk."""
    prefix: float
    """For each token before a chunk of a prompt whose keys and values are read for it."""
    seen: float
    """For each token whose keys and values are read in a step of one token."""
    window: int | None = None
    """The most tokens that a token sees; None: all before it."""
    block: int = 1
    """A step of one token reads whole blocks of so many tokens; 1: no more than it sees."""
    overhead: float = 0.0
    """Of the seconds of products those of calls, not of weights: every rank that shares the layer has them, and others
    that read memory do not make them more."""
    replay_saving: float = 0.0
    """By how much less a batch of single tokens takes where one rank computes the whole model, and replays it."""

    def batch(self, chunks: Sequence[Chunk]) -> float:
        """Return the seconds of a batch; 0.0 for none."""
        if not chunks:
            return 0.0
        pairs, prefix, seen = _read([(chunk.start, chunk.tokens) for chunk in chunks], self.window, self.block)
        attention = self.pair * pairs + self.prefix * prefix + self.seen * seen
        tokens = sum(chunk.tokens for chunk in chunks)
        at = min(max(1, bisect_left(self.matrices, (tokens, -math.inf))), len(self.matrices) - 1)
        (few, least), (many, most) = self.matrices[at - 1], self.matrices[at]
        products = least + (most - least) * (tokens - few) / (many - few)
        less = self.replay_saving if tokens == len(chunks) else 0.0
        return products + self.chunk * (len(chunks) - 1) + attention - less

    def shared(self, cut_share: float, tp: int, kv_parts: int) -> LayerCost:
        """Return the cost at one of `tp` ranks that divide `cut_share` of the weights, and heads.

        Heads of keys and values are in so many parts.
        """
        kept, overhead = 1 - cut_share + cut_share / tp, self.overhead
        matrices = tuple((tokens, overhead + kept * (seconds - overhead)) for tokens, seconds in self.matrices)
        return replace(
            self, matrices=matrices, pair=self.pair / tp, prefix=self.prefix / kv_parts, seen=self.seen / kv_parts
        )

    def beside(self, contention: float) -> LayerCost:
        """Return the cost while others read the same memory, from which it reads by that share more slowly.

        What a batch of the fewest tokens takes besides overhead is taken to be reading weights.
        """
        reading = contention * (self.matrices[0][1] - self.overhead)
        return replace(
            self,
            matrices=tuple((tokens, seconds + reading) for tokens, seconds in self.matrices),
            prefix=(1 + contention) * self.prefix,
            seen=(1 + contention) * self.seen,
        )

    def with_replays(self, shares: Sequence[tuple[Sequence[tuple[int, int]], float]]) -> LayerCost:
        """Return the cost where batches of single tokens that are replayed take these shares of what others take."""
        saved = [(1 - share) * self.batch([Chunk("", *chunk) for chunk in chunks]) for chunks, share in shares]
        return replace(self, replay_saving=max(0.0, min(median(saved), self.matrices[0][1])))

    def times(self, factor: float) -> LayerCost:
        """Return so many times these seconds."""
        matrices = tuple((tokens, factor * seconds) for tokens, seconds in self.matrices)
        terms = ("chunk", "pair", "prefix", "seen", "overhead", "replay_saving")
        return replace(self, matrices=matrices, **{name: factor * getattr(self, name) for name in terms})

    def with_reading(self, seconds: float) -> LayerCost:
        """Return the cost where a batch of the fewest tokens reads weights for so long: the rest is overhead."""
        return replace(self, overhead=max(0.0, self.matrices[0][1] - seconds))

    @classmethod
    def fit(
        cls, samples: Sequence[BatchTiming], window: int | None = None, block: int = 1, *, attention: bool = True
    ) -> Self:
        """Fit by least squares of relative errors; lines bend at numbers of tokens that were measured.

        `attention`: whether keys and values are read. Raises `ConfigError` for fewer than two numbers of tokens, and
        for seconds that are not above zero.
        """
        totals = sorted({sum(count for _, count in sample.chunks) for sample in samples})
        if len(totals) < 2 or min(sample.seconds for sample in samples) <= 0:
            raise ConfigError(
                f"batches of {totals} tokens cannot be fitted; measure two numbers or more, in seconds above 0"
            )
        bends = _bends(totals)
        rows = []
        for sample in samples:
            parts = [*_lengths(bends, sum(count for _, count in sample.chunks)), len(sample.chunks) - 1]
            parts += _read(sample.chunks, window, block) if attention else (0, 0, 0)
            rows.append([part / sample.seconds for part in parts])
        *slopes, chunk, pair, prefix, seen = not_negative(rows)
        seconds, matrices = slopes[0], [(bends[0], slopes[0])]
        for (few, many), slope in zip(pairwise(bends), slopes[1:], strict=True):
            seconds += slope * (many - few)
            matrices.append((many, seconds))
        return cls(tuple(matrices), chunk, pair, prefix, seen, window, block)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """Make one of its fields, as JSON has them. Raises `ValueError`, `KeyError` or `TypeError` for what is none."""
        matrices = tuple((int(tokens), float(seconds)) for tokens, seconds in fields["matrices"])
        chunk, pair, prefix, seen = terms = [float(fields[name]) for name in ("chunk", "pair", "prefix", "seen")]
        window, overhead = None if fields["window"] is None else int(fields["window"]), float(fields["overhead"])
        saving = float(fields["replay_saving"])
        cost = cls(matrices, chunk, pair, prefix, seen, window, int(fields["block"]), overhead, saving)
        values = [*(seconds for _, seconds in matrices), *terms, overhead, saving]
        ascending = all(few < many for (few, _), (many, _) in pairwise(matrices))
        if len(matrices) < 2 or not ascending or not all(math.isfinite(value) and value >= 0 for value in values):
            raise ValueError(f"{cost} is no cost")
        return cost


def r_squared(cost: LayerCost, samples: Sequence[BatchTiming]) -> float:
    """Return the share of the variance of the samples' seconds that a cost explains."""
    taken = [sample.seconds for sample in samples]
    mean = math.fsum(taken) / len(taken)
    guesses = [cost.batch([Chunk("", start, count) for start, count in sample.chunks]) for sample in samples]
    left = math.fsum((guess - seconds) ** 2 for guess, seconds in zip(guesses, taken, strict=True))
    return 1 - left / math.fsum((seconds - mean) ** 2 for seconds in taken)


def _read(chunks: Sequence[tuple[int, int]], window: int | None, block: int) -> tuple[int, int, int]:
    """Return the pairs of prompts, the tokens before them that are read, and those that steps of one token read."""
    pairs = prefix = seen = 0
    for start, count in chunks:
        before = start if window is None else min(start, window)
        if count == 1:
            seen += -(-(before + 1) // block) * block
        else:
            pairs += count * (before + count)
            prefix += before
    return pairs, prefix, seen


def _bends(totals: Sequence[int]) -> list[int]:
    """Return the numbers of tokens at which a line bends: such as are at least 1.5 times the one before, and the last.

    The first is that of the smallest batch.
    """
    bends = [totals[0]]
    for total in totals[1:]:
        if total >= 1.5 * bends[-1]:
            bends.append(total)
    if bends[-1] != totals[-1]:
        bends[-1 if len(bends) > 1 else len(bends) :] = [totals[-1]]
    return bends


def _lengths(bends: Sequence[int], tokens: int) -> list[float]:
    """Return 1, and how much of each stretch between two bends lies below so many tokens; beyond counts to the last."""
    spans = [min(tokens, many) - few if tokens > few else 0 for few, many in pairwise(bends)]
    spans[-1] += max(0, tokens - bends[-1])
    return [1.0, *map(float, spans)]
