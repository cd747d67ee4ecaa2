"""The format of matrices in 8, 4 or 3 bits."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import torch

from elastic.errors import ConfigError
from elastic.quant.formats.base import Kernel, KernelTarget, MatrixShape, PackedTensors, register
from elastic.quant.formats.integer import Integers, QuantizedMatrix, round_to_nearest


class IntegerFormat:
    """Packs matrices as the integer kernels of a device want them, and multiplies with them."""

    def supports(self, config: Integers, matrix: MatrixShape) -> str | None:
        """None, or in words why a matrix of this shape cannot be packed."""
        size = matrix.inputs if config.group_size == -1 else config.group_size
        if matrix.outputs % 16 or matrix.inputs % 16:
            return f"{matrix.outputs} outputs and {matrix.inputs} inputs are not multiples of 16"
        if matrix.inputs % size:
            return f"group_size={size} does not divide {matrix.inputs} inputs"
        return None

    def quantize(
        self, config: Integers, weight: torch.Tensor, inputs: torch.Tensor | None, target: KernelTarget
    ) -> PackedTensors:
        """Pack a matrix, [outputs, inputs]: its nearest codes, or with scales searched for these inputs."""
        _demand(self, config, _shape(weight))
        if inputs is None:
            return pack(config, round_to_nearest(weight, config), target)
        from elastic.quant.formats.awq_search import search_scales

        return pack(config, search_scales(weight, inputs, config), target)

    def value(self, config: Integers, parts: PackedTensors, matrix: MatrixShape, target: KernelTarget) -> torch.Tensor:
        """The matrix that the parts stand for, float32 [outputs, inputs]."""
        return unpack(config, parts, matrix, target).value()

    def paths(
        self, config: Integers, parts: PackedTensors, matrix: MatrixShape, target: KernelTarget
    ) -> Mapping[str, Kernel]:
        """The ways to multiply with these parts, by name; "reference" is the slow one that all are tested against."""
        _demand(self, config, matrix)

        def reference(x: torch.Tensor, parts: PackedTensors) -> torch.Tensor:
            return (x.float().contiguous() @ self.value(config, parts, matrix, target).t()).to(x.dtype)

        return {**_device(target).paths(config, parts, matrix, target), "reference": reference}

    def repack(
        self,
        config: Integers,
        parts: PackedTensors,
        matrix: MatrixShape,
        packed_for: KernelTarget,
        target: KernelTarget,
    ) -> PackedTensors:
        """The same matrix for another target, with the very same codes."""
        return parts if packed_for == target else pack(config, unpack(config, parts, matrix, packed_for), target)


def pack(config: Integers, codes: QuantizedMatrix, target: KernelTarget) -> PackedTensors:
    """Codes as the parts that the kernels of a target take.

    Raises `ConfigError` where the codes are not of this config, or their shape cannot be packed.
    """
    matrix = _shape(codes.codes)
    _demand(INTEGERS, config, matrix)
    groups = 1 if config.group_size == -1 else matrix.inputs // config.group_size
    if codes.groups != groups:
        raise ConfigError(f"the codes have {codes.groups} groups of inputs, {config} has {groups}")
    if codes.codes.numel() and int(codes.codes.max()) >= 2**config.bits:
        raise ConfigError(f"codes up to {int(codes.codes.max())} do not fit {config.bits} bits")
    parts: PackedTensors = _device(target).pack(config, codes, target)
    return parts


def unpack(config: Integers, parts: PackedTensors, matrix: MatrixShape, target: KernelTarget) -> QuantizedMatrix:
    """The codes that were packed for a target; scales as rounded to bfloat16."""
    codes: QuantizedMatrix = _device(target).unpack(config, parts, matrix, target)
    return codes


def _device(target: KernelTarget) -> ModuleType:
    if target.device == "cpu":
        from elastic.quant.kernels import cpu

        return cpu
    if target.device == "cuda":
        from elastic.quant.kernels import cuda

        return cuda
    raise ConfigError(f"no integer kernels for device {target.device!r}; use cpu or cuda")


def _shape(matrix: torch.Tensor) -> MatrixShape:
    if matrix.dim() != 2:
        raise ConfigError(f"a matrix has two dimensions, not the shape {tuple(matrix.shape)}")
    return MatrixShape(*matrix.shape)


def _demand(format: IntegerFormat, config: Integers, matrix: MatrixShape) -> None:
    problem = format.supports(config, matrix)
    if problem:
        raise ConfigError(f"{config} cannot pack this matrix: {problem}")


INTEGERS = IntegerFormat()
register(Integers, INTEGERS)
