"""The layout of a layer in a variant, from shapes alone: its parameters may be on the meta device."""

from __future__ import annotations

from typing import Any

import torch

from elastic.errors import ConfigError
from elastic.memory.weight_layout import LayerLayout, ParameterLayout
from elastic.quant.formats.base import KernelTarget, PartShapes, format_of
from elastic.quant.formats.pruned import Structured
from elastic.quant.variants.channels import channel_groups, flat_matrices
from elastic.quant.variants.eligible import LayerParameters, fitting, matrices, matrix_of


def packed_layout(layer: LayerParameters, full: LayerLayout, config: Any, target: KernelTarget) -> LayerLayout:
    """Return how a layer lies in a variant of this config, packed without samples; `full` is how it lies otherwise.

    Raises `ConfigError` for a layer that cannot be packed so.
    """
    packed = layer_part_shapes(layer, config, target)
    entries: dict[str, ParameterLayout] = {}
    for name, parameter in full.parameters.items():
        if name in packed:
            for part, (shape, dtype) in packed[name].items():
                entries[f"{name}/{part}"] = ParameterLayout(shape, dtype, tuple(range(len(shape))), shape)
        else:
            entries[name] = parameter
    return LayerLayout.pack(entries)


def layer_part_shapes(layer: LayerParameters, config: Any, target: KernelTarget) -> dict[str, PartShapes]:
    """Return the parts of each parameter that a layer's variant packs, by name. Raises `ConfigError` if it packs none.

    Parts of experts are stacked: [experts, ...].
    """
    if isinstance(config, Structured):
        return _channel_shapes(layer, config)
    shapes: dict[str, PartShapes] = {}
    for name, parameter, transposed in matrices(layer):
        matrix = matrix_of(parameter, transposed)
        fits = fitting(config, matrix)
        if fits is not None:
            parts = format_of(fits)(fits, matrix, target).part_shapes(parameter.dtype)
            experts = tuple(parameter.shape[:-2])
            shapes[name] = {part: ((*experts, *shape), dtype) for part, (shape, dtype) in parts.items()}
    if not shapes:
        raise ConfigError(f"no matrix of {layer.name or 'the layer'} can be packed as {config}")
    return shapes


def _channel_shapes(layer: LayerParameters, config: Structured) -> dict[str, PartShapes]:
    """Return the parts of the matrices that get smaller by structured pruning."""
    flat = flat_matrices(layer, config)
    shapes: dict[str, PartShapes] = {}
    for group in channel_groups(layer, config, flat):
        for name in group.sources:
            outputs, inputs = flat[name].shape
            stay = outputs // group.channels * group.stay
            shapes[name] = {"packed": ((stay, inputs), flat[name].dtype), "outputs": ((stay,), torch.int32)}
        sink = flat[group.sink]
        packed = ((sink.shape[0], group.stay), sink.dtype)
        shapes[group.sink] = {"packed": packed, "inputs": ((group.stay,), torch.int32)}
    return shapes
