"""Decoder layers whose matrices were rounded or pruned and put back: the values of packed layers, without kernels."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from elastic.quant.formats.integer import Integers, round_to_nearest
from elastic.quant.variants.eligible import LayerParameters, fitting, matrices, matrix_of
from elastic.quant.variants.pack_model import packer
from elastic.quant.variants.variant import MatrixParameter, Variant


@torch.no_grad()
def dequantized_layer(
    layer: nn.Module, config: Any, name: str = "", inputs: Mapping[str, torch.Tensor] | None = None
) -> nn.Module:
    """Copy a decoder layer and give its matrices the values of a variant, in their own dtype.

    The same matrices are changed that `wrap` packs for a variant of this config: integers to the nearest code, with the
    same groups; others as they are packed. `inputs` has samples of the inputs of matrices, [rows, inputs], by their
    full names, for a criterion that needs them; `name` is that of the layer in its model.
    """
    copied = copy.deepcopy(layer)
    own = LayerParameters.of(copied, name)
    if not isinstance(config, Integers):
        for key, packing in packer(Variant("profiled", config), inputs or {})(own).items():
            assert isinstance(packing, MatrixParameter)
            own.parameters[key][1].copy_(packing.packed.value())
        return copied
    for _, parameter, transposed in matrices(own):
        fits = fitting(config, matrix_of(parameter, transposed))
        stack = parameter.detach().transpose(-1, -2) if transposed else parameter.detach()
        for matrix in stack.unsqueeze(0) if stack.ndim == 2 else stack:
            if fits is not None:
                matrix.copy_(round_to_nearest(matrix, fits).value())
    return copied
