"""Variants read from quantized checkpoints: matrices as they are there, and the norms and biases that go with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from elastic.errors import ConfigError
from elastic.memory.checksum import digest
from elastic.quant.checkpoints.reader import QuantizedCheckpoint
from elastic.quant.formats.base import KernelTarget, MatrixShape
from elastic.quant.formats.integer import QuantizedMatrix
from elastic.quant.kernels.integer_format import pack
from elastic.quant.variants.eligible import LayerParameters, matrices, matrix_of
from elastic.quant.variants.packed_weight import PackedMatrix
from elastic.quant.variants.variant import CheckpointParameter, Packing, ReplacedParameter


def checkpoint_packer(path: str | Path) -> Callable[[LayerParameters], Mapping[str, Packing]]:
    """What packs a layer as a checkpoint has it. Raises `ConfigError` for one that cannot be read."""
    files = QuantizedCheckpoint(path)

    @torch.no_grad()
    def read(layer: LayerParameters) -> Mapping[str, Packing]:
        packings: dict[str, Packing] = {}
        for name, parameter, transposed in matrices(layer):
            codes = files.codes(f"{layer.name}.{name}")
            if codes is not None:
                _check(files, layer, name, codes, matrix_of(parameter, transposed))
                packings[name] = _packed(files, codes, parameter, transposed)
        if not packings:
            raise ConfigError(
                f"{files.path} has no quantized matrix of {layer.name}: is it a checkpoint of this model?"
            )
        for name, (_, parameter) in layer.parameters.items():
            value = files.plain(f"{layer.name}.{name}") if name not in packings else None
            if value is not None and not _same(value, parameter):
                _require_shape(files, f"{layer.name}.{name}", tuple(value.shape), tuple(parameter.shape))
                packings[name] = ReplacedParameter(value.to(parameter.dtype), digest(parameter))
        return packings

    return read


def _packed(
    files: QuantizedCheckpoint, codes: QuantizedMatrix, parameter: torch.Tensor, transposed: bool
) -> CheckpointParameter:
    target, matrix = KernelTarget.of(parameter.device), MatrixShape(*codes.codes.shape)
    parts = pack(files.config, codes.to(parameter.device), target)
    return CheckpointParameter(
        PackedMatrix(files.config, matrix, target, parts, parameter.dtype, transposed), digest(parameter)
    )


def _check(
    files: QuantizedCheckpoint, layer: LayerParameters, name: str, codes: QuantizedMatrix, matrix: MatrixShape
) -> None:
    """Raises `ConfigError` for a matrix of another shape, and for a bias that the model has no place for."""
    _require_shape(files, f"{layer.name}.{name}", tuple(codes.codes.shape), (matrix.outputs, matrix.inputs))
    bias_name = f"{name.removesuffix('weight')}bias"
    bias = files.plain(f"{layer.name}.{bias_name}") if bias_name not in layer.parameters else None
    if bias is not None and bool(bias.any()):
        raise ConfigError(f"{files.path}: {layer.name}.{bias_name} is there, but the model has no such bias")


def _require_shape(files: QuantizedCheckpoint, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise ConfigError(f"{files.path}: {name} has shape {found}, the model's has {expected}; is it of this model?")


def _same(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    return value.shape == parameter.shape and torch.equal(value.to(parameter.dtype), parameter.detach().cpu())
