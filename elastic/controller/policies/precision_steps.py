"""The steps by which a policy makes a model coarser, and back: one layer to the next variant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic.types import Restore, Swap


@dataclass(frozen=True)
class LayerSize:
    """The bytes of a decoder layer at its place, in whole pages."""

    full: str
    """The name of its full precision, such as `float32`."""
    full_bytes: int
    variants: Mapping[str, int]
    """Variant -> bytes; without those in which it is full, too."""

    def nbytes(self, variant: str) -> int:
        """Return the bytes of the layer in a variant, or in full precision by its name."""
        return self.full_bytes if variant == self.full else self.variants[variant]


@dataclass(frozen=True)
class PrecisionStep:
    """One layer from a variant to a coarser one."""

    layer: int
    before: str
    after: str
    before_bytes: int
    after_bytes: int
    """The difference is what the KV cache gains; a restore takes as much."""


def path(
    order: Sequence[int], levels: Sequence[str], sizes: Sequence[LayerSize], max_layers: int
) -> tuple[PrecisionStep, ...]:
    """List all steps, the first to do first: every layer to the first level, then every layer on to the next."""
    steps = []
    for number, after in enumerate(levels):
        for layer in order[:max_layers]:
            size = sizes[layer]
            if after in size.variants:
                before = next((level for level in reversed(levels[:number]) if level in size.variants), size.full)
                steps.append(PrecisionStep(layer, before, after, size.nbytes(before), size.nbytes(after)))
    return tuple(steps)


def still_there(done: Sequence[PrecisionStep], layers: Sequence[str]) -> tuple[PrecisionStep, ...]:
    """Return the steps asked for that the layers' variants show: none that failed, or that was undone."""
    last = {step.layer: i for i, step in enumerate(done) if layers[step.layer] == step.after}
    return tuple(step for i, step in enumerate(done) if i <= last.get(step.layer, -1))


def swaps(steps: Sequence[PrecisionStep]) -> tuple[Swap, ...]:
    """Return the actions that do these steps."""
    layers: dict[str, list[int]] = {}
    for step in steps:
        layers.setdefault(step.after, []).append(step.layer)
    return tuple(Swap(tuple(indices), variant) for variant, indices in layers.items())


def restores(steps: Sequence[PrecisionStep], sizes: Sequence[LayerSize]) -> tuple[Swap | Restore, ...]:
    """Return the actions that undo these steps, which are given last done first."""
    layers: dict[tuple[str, bool], list[int]] = {}
    for layer, variant in {step.layer: step.before for step in steps}.items():
        layers.setdefault((variant, variant == sizes[layer].full), []).append(layer)
    return tuple(
        Restore(tuple(indices)) if full else Swap(tuple(indices), variant)
        for (variant, full), indices in layers.items()
    )
