"""The parameters of a decoder layer that are packed, and the config that fits each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from elastic.quant.formats.base import MatrixShape, format_of
from elastic.quant.formats.integer import Integers
from elastic.quant.kernels import integer_format  # noqa: F401  (registers its format)
from elastic.quant.pruning import sparse_format, structured_format  # noqa: F401  (the same)

NO_MATRICES = "it has none in full precision; load the model without quantization, or wrap it without variants"
"""Why a layer without any has no variants."""


def is_packable(module: nn.Module, parameter: torch.Tensor) -> bool:
    """Return whether a Hugging Face module multiplies its input with this parameter, [..., outputs, inputs]."""
    from transformers.pytorch_utils import Conv1D

    if parameter.ndim == 3:
        return not isinstance(module, _ConvNd)
    return parameter.ndim == 2 and isinstance(module, nn.Linear | Conv1D)


@dataclass(frozen=True)
class LayerParameters:
    """The name and the parameters of one decoder layer."""

    name: str
    """The name of the layer in its model."""
    parameters: Mapping[str, tuple[nn.Module, torch.Tensor]]
    """Name in the layer -> the module that has the parameter, and the parameter."""
    is_packable: Callable[[nn.Module, torch.Tensor], bool] = is_packable
    """Whether a module multiplies its input with a parameter: a matrix, or one for each expert."""
    head_sizes: Mapping[str, int] = field(default_factory=dict)
    """Name in the layer of an attention module -> the size of its heads."""

    @classmethod
    def of(cls, layer: nn.Module, name: str = "") -> LayerParameters:
        """Return all parameters of a module, under the name that it has in its model."""
        parameters: dict[str, tuple[nn.Module, torch.Tensor]] = {}
        for path, module in layer.named_modules():
            prefix = f"{path}." if path else ""
            parameters |= {prefix + key: (module, p) for key, p in module._parameters.items() if p is not None}
        return cls(name, parameters, head_sizes=head_sizes(layer))

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(iter(self.parameters.values()))[1].device


def head_sizes(layer: nn.Module) -> dict[str, int]:
    """Return the size of the heads of each attention module that says it, by the module's name in the layer."""
    sizes = {path: getattr(module, "head_dim", None) for path, module in layer.named_modules()}
    return {path: size for path, size in sizes.items() if isinstance(size, int)}


def matrices(layer: LayerParameters) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield the parameters to be packed: name, parameter, and whether it is transposed.

    A parameter is [outputs, inputs], transposed [inputs, outputs], with the experts in front if it has any. Packed are
    those of linear modules and of experts; a matrix with one output for each expert chooses them, and stays full.
    """
    from transformers.pytorch_utils import Conv1D

    packable = {name: pair for name, pair in layer.parameters.items() if layer.is_packable(*pair)}
    stacks = [(module, parameter) for module, parameter in packable.values() if parameter.ndim == 3]
    experts = {parameter.shape[0] for _, parameter in stacks}
    for name, (module, parameter) in packable.items():
        if parameter.ndim == 3:
            yield name, parameter, _inputs_first(module, [p for owner, p in stacks if owner is module])
        elif parameter.shape[0] not in experts:
            yield name, parameter, isinstance(module, Conv1D)


def expert_shapes(layer: LayerParameters) -> dict[str, tuple[int, ...]]:
    """Return the shapes of experts' matrices by name, [experts, ..., ...], also of those one below another (DBRX)."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (module, parameter) in layer.parameters.items():
        if parameter.ndim == 3 and layer.is_packable(module, parameter):
            shapes[name] = tuple(parameter.shape)
        elif parameter.ndim == 2 and (experts := getattr(module, "moe_num_experts", 0)):
            shapes[name] = (experts, parameter.shape[0] // experts, parameter.shape[1])
    return shapes


def _inputs_first(module: nn.Module, stacks: Sequence[torch.Tensor]) -> bool:
    """Return whether the experts' matrices of a module, 3-D, are [experts, inputs, outputs].

    Most modules say so. Else, gate and up in one (Llama 4) have twice as many outputs as the one behind has inputs.
    """
    said = getattr(module, "is_transposed", None)
    if said is not None:
        return bool(said)
    return any(a.shape[1] == b.shape[2] and a.shape[2] == 2 * b.shape[1] for a, b in permutations(stacks, 2))


def matrix_of(parameter: torch.Tensor, transposed: bool) -> MatrixShape:
    """Return the shape of the matrices in a parameter, [..., outputs, inputs] or transposed."""
    rows, columns = parameter.shape[-2:]
    return MatrixShape(columns, rows) if transposed else MatrixShape(rows, columns)


def fitting(config: Any, matrix: MatrixShape) -> Any | None:
    """Return the config for a matrix: with smaller groups, or a single one, where its own do not divide the inputs.

    None means that the matrix stays full.
    """
    sizes = [64, 32, -1] if isinstance(config, Integers) and config.group_size != -1 else []
    smaller = [replace(config, group_size=size) for size in sizes if size < config.group_size]
    return next((c for c in (config, *smaller) if format_of(c).supports(c, matrix) is None), None)
