"""Variants read from quantized checkpoints: their matrices, and the norms and biases that go with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from elastic.errors import ConfigError
from elastic.memory.checksum import digest
from elastic.quant.checkpoints.reader import QuantizedCheckpoint
from elastic.quant.formats.base import KernelTarget
from elastic.quant.kernels.integer_format import IntegerFormat
from elastic.quant.variants.eligible import NO_MATRICES, LayerParameters, matrices, matrix_of
from elastic.quant.variants.packed_weight import PackedMatrix
from elastic.quant.variants.variant import MatrixParameter, Packing, ReplacedParameter


def checkpoint_packer(path: str | Path) -> Callable[[LayerParameters], Mapping[str, Packing]]:
    """Return a function that packs a layer as a checkpoint has it: nothing of one that it leaves in full precision.

    Raises `ConfigError` for a checkpoint that cannot be read.
    """
    checkpoint = QuantizedCheckpoint(path)

    @torch.no_grad()
    def pack_layer(layer: LayerParameters) -> Mapping[str, Packing]:
        packings: dict[str, Packing] = {}
        for name, parameter, transposed in matrices(layer):
            matrix = _read_matrix(checkpoint, layer, name, parameter, transposed)
            if matrix is not None:
                packings[name] = matrix
        others = {name: _read_plain(checkpoint, layer, name) for name in layer.parameters if name not in packings}
        if packings:
            return packings | _replaced(layer, others)
        full = [name for name, _, _ in matrices(layer)]
        if not full:
            raise ConfigError(f"{checkpoint.path}: no matrix of {layer.name} can be replaced: {NO_MATRICES}")
        missing = [name for name in full if others[name] is None]
        if missing:
            raise ConfigError(
                f"{checkpoint.path} has no quantized matrix of {layer.name}, nor {missing[0]}: is it a checkpoint of "
                "this model?"
            )
        return {}

    return pack_layer


def _read_matrix(
    checkpoint: QuantizedCheckpoint, layer: LayerParameters, name: str, parameter: torch.Tensor, transposed: bool
) -> MatrixParameter | None:
    """Read a matrix, None if it is not quantized there.

    Raises `ConfigError` for one of another shape, and for a bias that the model has no parameter for.
    """
    codes = checkpoint.codes(f"{layer.name}.{name}")
    if codes is None:
        return None
    matrix = matrix_of(parameter, transposed)
    _require_shape(checkpoint, f"{layer.name}.{name}", tuple(codes.codes.shape), (matrix.outputs, matrix.inputs))
    bias_name = f"{name.removesuffix('weight')}bias"
    bias = checkpoint.plain(f"{layer.name}.{bias_name}") if bias_name not in layer.parameters else None
    if bias is not None and bool(bias.any()):
        raise ConfigError(f"{checkpoint.path}: {layer.name}.{bias_name} is there, but the model has no such bias")
    form = IntegerFormat(checkpoint.config, matrix, KernelTarget.of(parameter.device))
    packed = PackedMatrix(form, form.pack(codes.to(parameter.device)), parameter.dtype, transposed)
    return MatrixParameter(packed, digest(parameter), from_checkpoint=True)


def _read_plain(checkpoint: QuantizedCheckpoint, layer: LayerParameters, name: str) -> torch.Tensor | None:
    """Map a parameter that is not quantized, in its shape `[...]`; None if the checkpoint lacks it."""
    value = checkpoint.plain(f"{layer.name}.{name}")
    if value is not None:
        shape = tuple(layer.parameters[name][1].shape)
        _require_shape(checkpoint, f"{layer.name}.{name}", tuple(value.shape), shape)
    return value


def _replaced(layer: LayerParameters, values: Mapping[str, torch.Tensor | None]) -> dict[str, Packing]:
    """Return those parameters of a layer that a checkpoint has, in their shapes `[...]`, with other values."""
    packings: dict[str, Packing] = {}
    for name, value in values.items():
        parameter = layer.parameters[name][1]
        if value is not None and not torch.equal(value.to(parameter.dtype), parameter.detach().cpu()):
            packings[name] = ReplacedParameter({"value": value.to(parameter.dtype)}, digest(parameter))
    return packings


def _require_shape(
    checkpoint: QuantizedCheckpoint, name: str, actual: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    if actual != expected:
        raise ConfigError(
            f"{checkpoint.path}: {name} has shape {actual}, the model's has {expected}; is it of this model?"
        )
