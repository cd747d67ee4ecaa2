"""The precisions that a unit of weights can have at its place: each parameter full, or packed in a variant."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from elastic.errors import ConfigError
from elastic.memory.host_store import HostTensor
from elastic.memory.weight_layout import LayerLayout, ParameterLayout
from elastic.weights.proxy.tensor import WeightProxy, WeightSource


class PackedParameter(Protocol):
    """One parameter in a variant: its tensors in host memory, and what stands for it when they are at a place."""

    source_digest: int
    """The digest of the full parameter that it stands for."""
    from_checkpoint: bool
    """True if it was read, so that it cannot be renewed."""
    parts: Mapping[str, torch.Tensor]
    """Host tensors by name, any shape and dtype that the format needs. Not to be written."""

    def content(
        self, like: torch.Tensor, parts: Mapping[str, torch.Tensor], full: WeightSource
    ) -> nn.Parameter | WeightProxy:
        """Make what sits in the parameter's slot when its parts are at the place.

        `like` and the result: the parameter's shape and dtype, such as [outputs, inputs]. `parts` are shaped as those
        of `self.parts`; `full` knows the full bytes.
        """

    def for_device(self, device: torch.device) -> PackedParameter:
        """Return the very same codes, as the kernels of a device take them."""

    def renewed(self, full: torch.Tensor, origin: int) -> PackedParameter:
        """Pack a parameter anew that was written: `full` has its shape, such as [outputs, inputs], and its dtype.

        `origin` is the digest of `full`. Raises `StateError` where that cannot be had.
        """


class LayerVariant(Protocol):
    """A layer in a variant: the parameters that differ from the full ones."""

    packings: dict[str, Any]
    """`PackedParameter`s by parameter; one is replaced when its parameter was written."""
    together: bool
    """True where its parameters only make sense together, such as norms that were rescaled for the matrices."""


class LayerPrecision:
    """One way for a unit to lie in a block: the packing of each parameter that is not full, and the layout of all."""

    def __init__(
        self, variants: Mapping[str, str], packings: Mapping[str, PackedParameter], layout: LayerLayout
    ) -> None:
        self.variants = variants
        """Parameter -> variant, for those that are not full."""
        self.packings = packings
        self.layout = layout
        self.nbytes = layout.nbytes
        self.key = tuple(sorted(variants.items()))
        """The same for precisions of a unit that are the same."""
        self._entries = {
            name: {part: f"{name}/{part}" for part in packing.parts} for name, packing in packings.items()
        }  # parameter -> part -> its name in the layout

    def stored_names(self, name: str) -> list[str]:
        """Return what a parameter consists of, by the names in the layout."""
        return list(self._entries[name].values()) if name in self._entries else [name]

    def tensors_of(self, name: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Pick the parts of a packed parameter, any shape, among a block's tensors by their names in the layout."""
        return {part: tensors[entry] for part, entry in self._entries[name].items()}

    def without(self, names: Collection[str]) -> LayerPrecision:
        """Return the same precision of the other parameters, where they lie."""
        return LayerPrecision(
            {name: variant for name, variant in self.variants.items() if name not in names},
            {name: packing for name, packing in self.packings.items() if name not in names},
            self.layout.without({entry for name in names for entry in self.stored_names(name)}),
        )


class UnitPrecisions:
    """The precisions of one unit, each made once: full, and those of its variants. (MorphServe, section 3.2)"""

    def __init__(
        self, unit: str, layout: LayerLayout, device: torch.device, variants: Mapping[str, LayerVariant]
    ) -> None:
        self.full = LayerPrecision({}, {}, layout)
        self.variants = dict(variants)
        """What the unit can be swapped to, by name."""
        self.made = {self.full.key: self.full}
        """By key."""
        self._unit = unit
        self._device = device
        first = next(iter(layout.parameters.values()), None)
        self.dtype = "none" if first is None else str(first.dtype).removeprefix("torch.")
        """The name of the first parameter's, such as `float16`."""
        self._names = {self.full.key: self.dtype}

    def having(self, chosen: Mapping[str, str]) -> LayerPrecision:
        """Return the precision with these parameters in variants (parameter -> variant), and all others full."""
        key = tuple(sorted(chosen.items()))
        if key not in self.made:
            packings = {
                name: self._variant(variant).packings[name].for_device(self._device) for name, variant in chosen.items()
            }
            entries: dict[str, ParameterLayout] = {}
            for name, layout in self.full.layout.parameters.items():
                if name in packings:
                    entries |= {f"{name}/{p}": ParameterLayout.like(t) for p, t in packings[name].parts.items()}
                else:
                    entries[name] = layout
            self.made[key] = LayerPrecision(dict(chosen), packings, LayerLayout.pack(entries))
        return self.made[key]

    def changed(
        self, present: LayerPrecision, names: Collection[str], variant: str | None, *, whole: bool
    ) -> LayerPrecision:
        """Return a precision with the parameters `names` in a variant instead; None: full.

        Raises `ConfigError` for an unknown variant, and for one that makes sense only for the whole layer unless
        `whole`.
        """
        chosen = {name: v for name, v in present.variants.items() if name not in names}
        if variant is not None:
            offered = self._variant(variant)
            if offered.together and not whole:
                raise ConfigError(
                    f"variant {variant!r} of {self._unit} has norms rescaled for its matrices: swap the whole layer"
                )
            chosen |= {name: variant for name in names if name in offered.packings}
        return self.having(chosen)

    def renewed(
        self, precision: LayerPrecision, kept: Mapping[str, HostTensor], full: Callable[[str], torch.Tensor]
    ) -> LayerPrecision:
        """Return a precision with every outdated packing made anew from the full parameters, any shape, that are kept.

        `full` returns one of them in the checkpoint's order. Raises `StateError` where that cannot be had.
        """
        for name, variant in precision.variants.items():
            packings, source = self._variant(variant).packings, kept[name]
            if packings[name].source_digest != source.digest:
                packings[name] = packings[name].renewed(full(name), source.digest)
        if outdated(precision, kept):
            self.made = {self.full.key: self.full}
        return self.having(precision.variants)

    def name_of(self, precision: LayerPrecision) -> str:
        """Return the name of a precision: a dtype, a variant, or several where parts are in different ones."""
        name = self._names.get(precision.key)
        if name is None:
            names, used = self.full.layout.parameters.keys(), set(precision.variants.values())
            complete = [
                v for v in self.variants if precision.variants.keys() == self.variants[v].packings.keys() & names
            ]
            pure = next((variant for variant in complete if used == {variant}), None)
            name = self._names[precision.key] = pure or "+".join([self.dtype, *sorted(used)])
        return name

    def _variant(self, name: str) -> LayerVariant:
        if name not in self.variants:
            offered = ", ".join(map(repr, self.variants)) or 'none: wrap(model, variants=("int4",)) makes them'
            raise ConfigError(f"{self._unit} has no variant {name!r}; there are {offered}")
        return self.variants[name]


def outdated(precision: LayerPrecision, kept: Mapping[str, HostTensor]) -> bool:
    """Return whether a packing stands for other bytes than the full parameters (any shape, by name) that are kept."""
    return any(packing.source_digest != kept[name].digest for name, packing in precision.packings.items())
