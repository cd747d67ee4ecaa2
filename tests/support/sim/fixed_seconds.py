"""A pace of steps that tests can count with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.planning.pipeline.chunk_cost import Chunk


@dataclass(frozen=True)
class FixedSeconds:
    """The same seconds for each step."""

    seconds: float

    def batch(self, chunks: Sequence[Chunk]) -> float:
        """Return them."""
        return self.seconds
