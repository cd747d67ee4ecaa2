"""Which parameters of a decoder layer are packed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from elastic.quant.formats import Matrix


@dataclass(frozen=True)
class LayerParameters:
    """One decoder layer, as far as packing cares."""

    name: str
    """Of the layer in its model."""
    parameters: Mapping[str, tuple[nn.Module, torch.Tensor]]
    """By name in the layer: the module that has the parameter, and the parameter."""

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values()))[1].device


def matrices(layer: LayerParameters) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """The parameters to be packed: name, parameter, and whether it is [.., inputs, outputs].

    Those of linear modules and of experts; the gates that choose experts stay full.
    """
    from transformers.pytorch_utils import Conv1D

    has_experts = any(parameter.ndim == 3 for _, parameter in layer.parameters.values())
    for name, (module, parameter) in layer.parameters.items():
        if not parameter.is_floating_point():
            continue
        if parameter.ndim == 3 and not isinstance(module, nn.Conv1d):
            yield name, parameter, bool(getattr(module, "is_transposed", False))
        elif parameter.ndim == 2 and isinstance(module, nn.Linear | Conv1D):
            owner = name.split(".")[-2] if "." in name else ""
            if not (has_experts and owner.endswith(("gate", "router"))):
                yield name, parameter, isinstance(module, Conv1D)


def matrix_of(parameter: torch.Tensor, transposed: bool) -> Matrix:
    """The shape of a parameter's matrices."""
    rows, columns = parameter.shape[-2:]
    return Matrix(columns, rows) if transposed else Matrix(rows, columns)
