"""Statically quantized layers: packed for good, in ordinary memory. What a swapped layer is compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from elastic.errors import StateError
from elastic.quant.variants.eligible import LayerParameters
from elastic.quant.variants.pack_model import measure_paths, packer
from elastic.quant.variants.variant import MatrixParameter, PackedLayer, Variant
from elastic.weights.proxy.tensor import WeightSource


class _OnlyPacked:
    """The full weights are gone: what is read out is the value in use."""

    def __init__(self, packing: MatrixParameter) -> None:
        self.value = self.copy = self.stored = packing.packed.value

    def write(self, value: torch.Tensor) -> None:
        raise StateError("a statically quantized weight is not written; quantize the new weights instead")

    def describe(self) -> str:
        return "of a statically quantized layer"


@torch.no_grad()
def pack_static(layer: nn.Module, variant: str | Variant) -> nn.Module:
    """Pack the matrices of a decoder layer in place, as `wrap` packs them for a variant; returns the same module."""
    own = LayerParameters.of(layer)
    packings = packer(Variant.parse(variant), {})(own)
    measure_paths([PackedLayer(packings, None)], next(layer.parameters()).device)
    for name, packing in packings.items():
        module, parameter = own.parameters[name]
        full: WeightSource = _OnlyPacked(packing)  # type: ignore[arg-type]
        content: Any = packing.content(parameter, packing.parts, full)
        module._parameters[name.rsplit(".", 1)[1]] = content
    return layer
