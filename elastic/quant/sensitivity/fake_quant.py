"""Decoder layers whose matrices were rounded to integers and back: the values of packed layers, without kernels."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from elastic.quant.formats.integer import round_to_nearest
from elastic.quant.variants.eligible import LayerParameters, fitting, matrices, matrix_of


@torch.no_grad()
def dequantized_layer(layer: nn.Module, config: Any) -> nn.Module:
    """Copy a decoder layer and round the values of its matrices to the nearest code, in their own dtype.

    The same matrices are rounded that `wrap` packs for a variant of this config (`Integers`), with the same groups.
    """
    copied = copy.deepcopy(layer)
    for _, parameter, transposed in matrices(LayerParameters.of(copied)):
        fits = fitting(config, matrix_of(parameter, transposed))
        stack = parameter.detach().transpose(-1, -2) if transposed else parameter.detach()
        for matrix in stack.unsqueeze(0) if stack.ndim == 2 else stack:
            if fits is not None:
                matrix.copy_(round_to_nearest(matrix, fits).value())
    return copied
