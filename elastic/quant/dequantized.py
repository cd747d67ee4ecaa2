"""A decoder layer whose matrices were rounded to integers and back: what a packed layer computes, without kernels."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from elastic.quant.codes import Integers, round_to_nearest

VARIANTS = {f"int{bits}": Integers(bits) for bits in (8, 4, 3)}
"""What the names of variants stand for."""
_GROUP_SIZES = (128, 64, 32)
_SMALLEST = 16


def dequantized_layer(layer: nn.Module, config: Integers) -> nn.Module:
    """A copy of a decoder layer with the values of its matrices rounded to the nearest code, in their own dtype.

    Rounded are `nn.Linear`, transformers' `Conv1D` and stacks of experts' matrices, in groups of `config.group_size`
    inputs, or of 128, 64, 32 or all of them, the first that divides the inputs. Routers, matrices with fewer than 16
    inputs or outputs, norms and biases stay as they are.
    """
    copied = copy.deepcopy(layer)
    with torch.no_grad():
        for matrix in _matrices(copied):
            matrix.copy_(round_to_nearest(matrix, _fitting(config, matrix.shape[1])).value())
    return copied


def _fitting(config: Integers, inputs: int) -> Integers:
    sizes = (config.group_size, *_GROUP_SIZES)
    return replace(config, group_size=next((size for size in sizes if size > 0 and inputs % size == 0), -1))


def _matrices(layer: nn.Module) -> Iterator[torch.Tensor]:
    """Views, [outputs, inputs], of what is rounded."""
    from transformers.pytorch_utils import Conv1D

    routers = set(_routers(layer))
    for module in layer.modules():
        for stack in _stacks(module):
            for matrix in stack.detach():
                yield from _large(matrix.T if getattr(module, "is_transposed", False) else matrix)
        if isinstance(module, nn.Linear) and module not in routers:
            yield from _large(module.weight.detach())
        elif isinstance(module, Conv1D):
            yield from _large(module.weight.detach().T)


def _routers(layer: nn.Module) -> Iterator[nn.Module]:
    """The linears beside experts that have one output for each of them."""
    for module in layer.modules():
        experts = {stack.shape[0] for child in module.children() for stack in _stacks(child)}
        for child in module.children():
            if isinstance(child, nn.Linear) and child.out_features in experts:
                yield child


def _stacks(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a module of experts that hold one matrix each per expert."""
    is_conv = isinstance(module, nn.modules.conv._ConvNd)
    return [p for p in module.parameters(recurse=False) if p.ndim == 3 and not is_conv]


def _large(matrix: torch.Tensor) -> Iterator[torch.Tensor]:
    if min(matrix.shape) >= _SMALLEST:
        yield matrix
