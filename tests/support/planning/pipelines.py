"""What microbatches are compared with: batches by tokens, and when the stages of a pipeline compute which batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from elastic.planning.pipeline.chunk_cost import Chunk, ChunkCost
from support.planning.halving import Batch


@dataclass(frozen=True)
class Timeline:
    """A pipeline's run over some batches, in seconds."""

    span_s: float
    """From the first batch's beginning to the last one's end."""
    ends_s: tuple[tuple[float, ...], ...]
    """For each batch, when each stage has computed it."""
    busy_s: float
    """Of all stages together."""

    @property
    def bubbles(self) -> float:
        """The share of the stages' time in which they wait."""
        stages = len(self.ends_s[0]) if self.ends_s else 0
        return 1 - self.busy_s / (stages * self.span_s) if stages and self.span_s else 0.0


def run_pipeline(seconds: Sequence[Sequence[float]], hop_s: float = 0.0) -> Timeline:
    """Run batches, in order, through stages: `seconds` of each batch at each stage, `hop_s` between two stages.

    A stage computes one batch at a time, and begins with one when the stage before has it done and the hidden states
    have come.
    """
    free_s = [0.0] * (len(seconds[0]) if seconds else 0)
    ends = []
    for batch in seconds:
        ready = 0.0
        for stage, took in enumerate(batch):
            free_s[stage] = max(ready, free_s[stage]) + took
            ready = free_s[stage] + hop_s
        ends.append(tuple(free_s))
    return Timeline(max(free_s, default=0.0), tuple(ends), sum(map(sum, seconds)))


def by_tokens(chunks: Sequence[Chunk], budget: int) -> tuple[Batch, ...]:
    """Fill batches up to `budget` tokens each, as Sarathi does."""
    batches: list[Batch] = []
    batch: list[Chunk] = []
    room = budget
    for chunk in chunks:
        rest = chunk
        while rest.tokens:
            part, rest = rest.cut(min(room, rest.tokens))
            batch.append(part)
            room -= part.tokens
            if not room:
                batches.append(tuple(batch))
                batch, room = [], budget
    return (*batches, tuple(batch)) if batch else tuple(batches)


def heavy_tail(seed: int, count: int = 40) -> list[Chunk]:
    """Return prompts of 64 to 4,096 tokens; few are long."""
    choose = random.Random(seed)
    return [Chunk(str(i), 0, int(64 * min(64, choose.paretovariate(1.0)))) for i in range(count)]


def tokens(batch: Sequence[Chunk]) -> int:
    """Count the tokens of a batch."""
    return sum(chunk.tokens for chunk in batch)


def bubbles(batches: Sequence[Sequence[Chunk]], cost: ChunkCost) -> float:
    """Return what two stages wait beyond what is lost at the ends, (s - 1) / (m + s - 1)."""
    return run_pipeline([[cost.batch(batch) / 2] * 2 for batch in batches]).bubbles - 1 / (len(batches) + 1)
