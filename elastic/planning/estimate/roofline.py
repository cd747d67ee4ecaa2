"""Seconds of batches from a device's data sheet: no less than it takes to compute, and no less than it takes to read.

These are predictions with peak rates, so bounds from below: kernels reach a share of them, and launching takes time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from elastic.planning.pipeline.chunk_cost import Chunk, ChunkCost


class BatchCost(Protocol):
    """Seconds of batches, such as of `ChunkCost` and `Roofline`."""

    def batch(self, chunks: Sequence[Chunk]) -> float:
        """Return the seconds of a batch; 0.0 for none."""


@dataclass(frozen=True)
class Work:
    """What a batch makes one part of a model do: some of the matrices of a layer, its attention, or the head."""

    weight_bytes: float = 0.0
    """Weights, read once a batch."""
    token_flops: float = 0.0
    """Operations for each token: two for each weight that it meets."""
    chunk_flops: float = 0.0
    """Operations for each chunk, of whose last token alone there are logits."""
    least_met: float = 1.0
    """The share of the weights that one token meets: below 1 where it is some experts of many."""
    pair_flops: float = 0.0
    """Operations of attention for each pair of a token and one that it sees."""
    kv_bytes: float = 0.0
    """Keys and values of one token, read for every chunk that sees it."""
    window: int | None = None
    """The most tokens that a token sees; None: all before it."""

    def shared(self, ranks: int, kv_parts: int = 1) -> Work:
        """Return what one of some ranks does that share it, with heads of keys and values in so many parts."""
        return replace(
            self,
            weight_bytes=self.weight_bytes / ranks,
            token_flops=self.token_flops / ranks,
            chunk_flops=self.chunk_flops / ranks,
            pair_flops=self.pair_flops / ranks,
            kv_bytes=self.kv_bytes / kv_parts,
        )

    def amounts(self, chunks: Sequence[Chunk]) -> tuple[float, float]:
        """Return the operations and the bytes of a batch."""
        tokens = sum(chunk.tokens for chunk in chunks)
        met = 1 - (1 - self.least_met) ** tokens  # tokens choose their experts independently
        seen = [self._seen(chunk) for chunk in chunks]
        flops = tokens * self.token_flops + len(chunks) * self.chunk_flops
        flops += sum(pairs for pairs, _ in seen) * self.pair_flops
        return flops, met * self.weight_bytes + sum(read for _, read in seen) * self.kv_bytes

    def _seen(self, chunk: Chunk) -> tuple[float, int]:
        """Return the pairs of a chunk's tokens and those that they see, and the tokens that are read for it."""
        _, start, count = chunk
        pairs, read = count * start + count * (count + 1) / 2, start + count
        if self.window is None:
            return pairs, read
        return min(pairs, float(count * self.window)), min(read, self.window + count - 1)


@dataclass(frozen=True)
class Roofline:
    """Seconds of such work on a device, whose parts are done one after another."""

    work: tuple[Work, ...]
    flops_s: float
    bytes_s: float

    def batch(self, chunks: Sequence[Chunk]) -> float:
        """Return the seconds of a batch: of operations, or of bytes, whichever is more for each part; 0.0 for none."""
        if not chunks:
            return 0.0
        amounts = (work.amounts(chunks) for work in self.work)
        return math.fsum(max(flops / self.flops_s, nbytes / self.bytes_s) for flops, nbytes in amounts)


def sharded_cost(cost: ChunkCost, cut_share: float, tp: int) -> ChunkCost:
    """Return the measured cost of a layer at one of `tp` ranks.

    `cut_share` of its weights are shared by the ranks, and of the time that weights take; attention is shared by heads.
    """
    kept = 1 - cut_share + cut_share / tp
    attention, weights = cost.times(1 / tp), cost.times(kept)
    return replace(weights, prefix=attention.prefix, own=attention.own, read=attention.read)
