"""Seconds of an instance's batches by a data sheet, as `InstanceCost` has them, for many batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastic.errors import ConfigError
from elastic.planning.estimate.performance import NO_LINK, InstanceCost
from elastic.planning.estimate.roofline import Roofline, Work
from elastic.planning.measured_cost import LinearLatency
from elastic.planning.pipeline.chunk_cost import Chunk


@dataclass(frozen=True)
class SheetSteps:
    """What `InstanceCost.pass_s` says of an instance of one stage; what a batch has is added up once for all parts."""

    work: tuple[tuple[Work, int], ...]
    """Parts of the model without a sliding window, and how many of each there are."""
    flops_s: float
    bytes_s: float
    exchanges: int = 0
    exchange: LinearLatency = NO_LINK
    token_bytes: int = 0

    @classmethod
    def of(cls, cost: InstanceCost) -> SheetSteps:
        """Return the same seconds. Raises `ConfigError` for what is not of a data sheet, of one stage, without windows.

        Those of other instances are to be had by `InstanceCost` itself.
        """
        parts = [(part, count) for stage in cost.stages for part, count in stage]
        rooflines = [(part, count) for part, count in parts if isinstance(part, Roofline)]
        work = tuple((work, count) for part, count in rooflines for work in part.work)
        if len(cost.stages) != 1 or len(rooflines) < len(parts) or any(each.window is not None for each, _ in work):
            raise ConfigError("only one stage of a model without sliding windows, at the rates of a data sheet")
        rates = {(part.flops_s, part.bytes_s) for part, _ in rooflines}
        ((flops_s, bytes_s),) = rates
        return cls(work, flops_s, bytes_s, cost.sums[0] if cost.sums else 0, cost.all_reduce, cost.token_bytes)

    def batch(self, chunks: Sequence[Chunk]) -> float:
        """Return the seconds of a batch; 0.0 for none."""
        if not chunks:
            return 0.0
        count, tokens, seen, pairs = len(chunks), 0, 0, 0.0
        for _, start, new in chunks:
            tokens += new
            seen += start + new
            pairs += new * (start + (new + 1) / 2)
        seconds = self.exchanges * self.exchange(self.token_bytes * tokens) if self.exchanges else 0.0
        for work, times in self.work:
            flops = tokens * work.token_flops + count * work.chunk_flops + pairs * work.pair_flops
            met = work.weight_bytes if work.least_met == 1 else (1 - (1 - work.least_met) ** tokens) * work.weight_bytes
            seconds += times * max(flops / self.flops_s, (met + seen * work.kv_bytes) / self.bytes_s)
        return seconds


@dataclass(frozen=True)
class DividedSteps:
    """What ranks divide that share layers: by what a step takes less of the time of each."""

    alone: SheetSteps
    shared: SheetSteps
    """At one of `ranks`."""
    ranks: int

    @classmethod
    def of(cls, alone: InstanceCost, shared: InstanceCost, ranks: int) -> DividedSteps:
        """Return it by the costs of an instance of one rank, and of so many. Raises `ConfigError` as `SheetSteps.of`
        does."""
        divided = SheetSteps.of(shared)
        return cls(SheetSteps.of(alone), replace(divided, exchanges=0), ranks)

    def batch(self, chunks: Sequence[Chunk]) -> float:
        """Return the seconds of a batch."""
        less = self.alone.batch(chunks) - self.shared.batch(chunks)
        return max(0.0, less) * self.ranks / (self.ranks - 1)
