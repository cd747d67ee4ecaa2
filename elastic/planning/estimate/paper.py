"""iServe's methods as printed, for an error table: they know neither ranks of unlike size nor a KV cache.

A footprint is that of all ranks together. (iServe, sections 5.2 and 5.3) The paper's names of its methods:

M1: the whole model at three configurations (`MemoryParts.solve`)
M2: its fingerprints at three configurations (`extrapolated_memory`)
M3: its fingerprints at every configuration (`PerLayer.solve`)
L1: the whole model without a pipeline, two outputs (`Latency.solve`)
L2: its fingerprints without a pipeline, two outputs (`extrapolated_latency`)

`estimate_by_parts` makes an estimate of what they give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
class PerLayer:
    """What is linear in the layers: bytes, or seconds. With kinds of layers, one term for each. (Figure 7)"""

    kinds: Mapping[str, float]
    """Of one layer, by kind."""
    other: float

    @classmethod
    def solve(cls, one_of_each: float, with_one_more: Mapping[str, float]) -> PerLayer:
        """Solve for a model with one layer of each kind, and for models with one more of a kind, by kind.

        With a single kind these are the paper's fingerprints of one and of two layers.
        """
        kinds = {kind: value - one_of_each for kind, value in with_one_more.items()}
        return cls(kinds, one_of_each - sum(kinds.values()))

    def of(self, layers: Mapping[str, int]) -> float:
        """Return the value of a model with so many layers of each kind. (Equations 2 and 3)"""
        return self.other + sum(self.kinds[kind] * count for kind, count in layers.items())


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


def extrapolated_latency(
    one_of_each: Latency, with_one_more: Mapping[str, Latency], layers: Mapping[str, int]
) -> Latency:
    """Return the latency of the whole model from its fingerprints: method L2. (Equations 2 and 3)"""
    ttft = PerLayer.solve(one_of_each.ttft_s, {kind: each.ttft_s for kind, each in with_one_more.items()})
    tpot = PerLayer.solve(one_of_each.tpot_s, {kind: each.tpot_s for kind, each in with_one_more.items()})
    return Latency(ttft.of(layers), tpot.of(layers))


def extrapolated_memory(
    footprints: Sequence[tuple[float, Mapping[str, float]]], layers: Mapping[str, int]
) -> MemoryParts:
    """Return the parts of the whole model's footprint from its fingerprints': method M2.

    `footprints`: at (1, 1), (1, 2) and (2, 1), of the model with one layer of each kind, and of those with one more.
    """
    plain, two_stages, two_parts = (PerLayer.solve(footprint, more).of(layers) for footprint, more in footprints)
    return MemoryParts.solve(plain, two_stages, two_parts)


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
