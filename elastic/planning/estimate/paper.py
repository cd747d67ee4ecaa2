"""iServe's methods as printed, for an error table: they know neither ranks of unlike size nor a KV cache.

A footprint is that of all ranks together. (iServe, sections 5.2 and 5.3) The paper's M1 is `MemoryParts.solve`,
of the whole model at three configurations; L1 is `Latency.solve`, without a pipeline, of two outputs.

`estimate_by_parts` makes an estimate of what they give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.errors import ConfigError
from elastic.planning.estimate.configuration import Configuration
from elastic.planning.estimate.devices import Device, shown_bytes
from elastic.planning.estimate.performance import Load
from elastic.planning.estimate.ranking import Estimate

OUTPUTS = (4, 12)
"""Tokens of the two outputs, of which the paper says only that they differ."""


@dataclass(frozen=True)
class MemoryParts:
    """What a footprint consists of, in bytes. (Figure 8)"""

    weights: float
    """W: once, however many ranks there are."""
    activations: float
    """A: once for each part of tensor parallelism."""
    stage_activations: float
    """A_p: for each rank of a pipeline."""

    @classmethod
    def solve(cls, plain: float, two_stages: float, two_parts: float) -> MemoryParts:
        """Solve the three equations, given the footprints at (TP, PP) = (1, 1), (1, 2) and (2, 1)."""
        activations = two_parts - plain
        return cls(plain - activations, activations, (two_stages - plain) / 2)

    def footprint(self, tp: int, pp: int) -> float:
        """Return the bytes of all ranks together. (Figure 8)"""
        base = self.weights + self.activations
        stages = tp * pp * self.stage_activations if pp > 1 else 0.0
        return base + (tp - 1) * self.activations + stages


@dataclass(frozen=True)
class Latency:
    """Seconds to the first token, and for each one more. (Equation 1)"""

    ttft_s: float
    tpot_s: float

    @classmethod
    def solve(cls, short: tuple[int, float], long: tuple[int, float]) -> Latency:
        """Solve equation 1 for two requests that differ in their output: (tokens, seconds) each.

        Raises `ConfigError` for outputs of the same length.
        """
        (few, short_s), (many, long_s) = short, long
        if few == many:
            raise ConfigError(f"two outputs of {few} tokens do not tell TTFT from TPOT; measure two lengths")
        tpot_s = (long_s - short_s) / (many - few)
        return cls(short_s - few * tpot_s, tpot_s)

    def __call__(self, tokens: int) -> float:
        """Return the seconds of an output of so many tokens, at whatever context. (Equation 1)"""
        return self.ttft_s + tokens * self.tpot_s


def estimate_by_parts(
    configuration: Configuration,
    stages: tuple[range, ...],
    devices: Sequence[Device],
    load: Load,
    memory: MemoryParts,
    latency: Latency,
) -> Estimate:
    """Return what the methods say of a configuration: bytes of all ranks together, seconds of one request by itself.

    Of the bytes each of the first devices has an even part. What the methods do not know is left out: bytes of each
    rank, rates, and how many requests there is room for; it is one at a time, as in the paper.
    """
    nbytes = memory.footprint(configuration.tp, configuration.pp)
    part, ranks = nbytes / configuration.ranks, configuration.ranks
    tight = min(devices[:ranks], key=lambda device: device.memory_bytes)
    lacks = part - tight.memory_bytes
    why_not = f"{tight.name} lacks {shown_bytes(round(lacks))} of an even part, {shown_bytes(round(part))}"
    return Estimate(
        configuration,
        stages,
        (),
        "",
        why_not if lacks > 0 else "",
        1,
        1,
        latency.ttft_s,
        latency.tpot_s,
        latency(load.new),
        memory_bytes=round(nbytes),
    )
