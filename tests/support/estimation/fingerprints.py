"""iServe's methods of fingerprints as printed, to compare with: seconds and bytes are linear in the layers. (section 5)

M2: the footprint of the whole model from its fingerprints at three configurations (`extrapolated_memory`)
M3: its fingerprints at every configuration (`PerLayer.solve`)
L2: the latency from its fingerprints without a pipeline, two outputs (`extrapolated_latency`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic.estimation.model_layout import LayerKind
from elastic.planning.estimate.paper import Latency, MemoryParts


def paper_fingerprints(kinds: Sequence[LayerKind]) -> tuple[tuple[int, ...], ...]:
    """Return the layers of the paper's fingerprints: one of each kind; then, for each kind, one more of it.

    Where a kind has a single layer, that one is there twice. With one kind these are one and two layers.
    """
    first = sorted(kind.layers[0] for kind in kinds)
    more = [sorted([*first, kind.layers[min(1, len(kind.layers) - 1)]]) for kind in kinds]
    return tuple(first), *(tuple(layers) for layers in more)


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
