"""The forms that a layer can have at its place: each parameter full, or packed in a variant."""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from elastic.memory.weight_layout import LayerLayout, ParameterLayout
from elastic.weights.proxy.tensor import WeightProxy, WeightSource


class PackedParameter(Protocol):
    """One parameter in a variant: its parts in host memory, and what stands for it when they are at a place."""

    @property
    def parts(self) -> Mapping[str, torch.Tensor]:
        """Host tensors by name. Not to be written."""
        ...

    @property
    def source_digest(self) -> int:
        """The digest of the full parameter that it stands for."""
        ...

    def content(
        self, like: torch.Tensor, parts: Mapping[str, torch.Tensor], full: WeightSource
    ) -> nn.Parameter | WeightProxy:
        """What sits in the parameter's slot when its parts are there."""
        ...

    def for_device(self, device: torch.device) -> PackedParameter:
        """The very same codes, for kernels of a device."""
        ...

    def renewed(self, full: torch.Tensor, origin: int) -> PackedParameter:
        """The same for a parameter that was written. Raises `StateError` where that cannot be had."""
        ...


class LayerVariant(Protocol):
    """A layer in a variant: the parameters that differ from the full ones."""

    @property
    def packings(self) -> MutableMapping[str, Any]:
        """`PackedParameter`s by parameter; one is replaced when its parameter was written."""
        ...

    @property
    def together(self) -> bool:
        """Whether its parameters only make sense together, as where norms were rescaled for the matrices."""
        ...


@dataclass(frozen=True)
class LayerPrecision:
    """How a layer lies in a block: the packing of each parameter that is not full, and the layout of all."""

    variants: Mapping[str, str]
    """Parameter -> variant, for those that are not full."""
    packings: Mapping[str, PackedParameter]
    layout: LayerLayout

    @property
    def key(self) -> tuple[tuple[str, str], ...]:
        return tuple(sorted(self.variants.items()))

    @property
    def full(self) -> bool:
        return not self.variants

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    def stored_names(self, name: str) -> list[str]:
        """What a parameter consists of, by the names in the layout."""
        return [entry(name, part) for part in self.packings[name].parts] if name in self.packings else [name]

    def without(self, names: Collection[str]) -> LayerPrecision:
        """The same form of the other parameters, where they lie."""
        gone = {lies for name in names for lies in self.stored_names(name)}
        return LayerPrecision(
            {name: variant for name, variant in self.variants.items() if name not in names},
            {name: packing for name, packing in self.packings.items() if name not in names},
            self.layout.without(gone),
        )

    def tensors_of(self, name: str, shown: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The parts of a packed parameter among what a block shows."""
        return {part: shown[entry(name, part)] for part in self.packings[name].parts}


def make_precision(
    full: LayerLayout, chosen: Mapping[str, str], packings: Mapping[str, PackedParameter]
) -> LayerPrecision:
    """The form in which the chosen parameters have these packings, and all others are full."""
    entries: dict[str, ParameterLayout] = {}
    for name, layout in full.parameters.items():
        if name in chosen:
            entries |= {entry(name, p): ParameterLayout.like(t) for p, t in packings[name].parts.items()}
        else:
            entries[name] = layout
    return LayerPrecision(dict(chosen), {name: packings[name] for name in chosen}, LayerLayout.pack(entries))


def entry(name: str, part: str) -> str:
    """What a part of a packed parameter is called in a layout."""
    return f"{name}/{part}"
