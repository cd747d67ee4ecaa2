"""The format of matrices in 8, 4 or 3 bits."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import torch

from elastic.errors import ConfigError
from elastic.quant.formats.awq_search import search_scales
from elastic.quant.formats.base import (
    Kernel,
    KernelTarget,
    MatrixShape,
    PackedTensors,
    PartShapes,
    register,
    require_packable,
)
from elastic.quant.formats.integer import Integers, QuantizedMatrix, round_to_nearest
from elastic.quant.kernels.checks import reference_kernel


class IntegerFormat:
    """The format that the integer kernels of CPUs and of CUDA take."""

    def supports(self, config: Integers, matrix: MatrixShape) -> str | None:
        """Return None, or in words why a matrix of this shape cannot be packed."""
        if matrix.outputs % 16 or matrix.inputs % 16:
            return f"{matrix.outputs} outputs and {matrix.inputs} inputs are not multiples of 16"
        size = config.inputs_per_group(matrix.inputs)
        if matrix.inputs % size:
            return f"group_size={size} does not divide {matrix.inputs} inputs"
        return None

    def part_shapes(
        self, config: Integers, matrix: MatrixShape, dtype: torch.dtype, target: KernelTarget
    ) -> PartShapes:
        """Return the parts that a matrix of this shape is packed into, in their order."""
        require_packable(config, (matrix.outputs, matrix.inputs))
        shapes: PartShapes = _kernels_for(target).part_shapes(config, matrix, target)
        return shapes

    def quantize(
        self, config: Integers, weight: torch.Tensor, inputs: torch.Tensor | None, target: KernelTarget
    ) -> PackedTensors:
        """Pack a matrix: its nearest codes, or codes with scales searched for its inputs (AWQ).

        weight: [outputs, inputs]. inputs: [tokens, inputs], samples; both of any float dtype. Raises `ConfigError` for
        a shape that is not supported.
        """
        require_packable(config, weight.shape)
        codes = round_to_nearest(weight, config) if inputs is None else search_scales(weight, inputs, config)
        return pack(config, codes, target)

    def value(self, config: Integers, parts: PackedTensors, matrix: MatrixShape, target: KernelTarget) -> torch.Tensor:
        """Expand parts to the matrix that they stand for, float32 [outputs, inputs]."""
        return unpack(config, parts, matrix, target).value()

    def paths(
        self, config: Integers, parts: PackedTensors, matrix: MatrixShape, target: KernelTarget
    ) -> Mapping[str, Kernel]:
        """Return the kernels that multiply x: [tokens, inputs] with such parts, by name."""
        require_packable(config, (matrix.outputs, matrix.inputs))
        reference = reference_kernel(lambda parts: self.value(config, parts, matrix, target))
        return {**_kernels_for(target).paths(config, parts, matrix, target), "reference": reference}

    def repack(
        self,
        config: Integers,
        parts: PackedTensors,
        matrix: MatrixShape,
        packed_for: KernelTarget,
        target: KernelTarget,
    ) -> PackedTensors:
        """Return the parts of the same [outputs, inputs] matrix for another target, with the very same codes."""
        return parts if packed_for == target else pack(config, unpack(config, parts, matrix, packed_for), target)


def pack(config: Integers, codes: QuantizedMatrix, target: KernelTarget) -> PackedTensors:
    """Lay codes, [outputs, inputs], out as the parts that the kernels of a target take (cpu_layout, cuda_layout).

    Raises `ConfigError` where the codes are not of this config, or their shape cannot be packed.
    """
    inputs = require_packable(config, codes.codes.shape).inputs
    groups = inputs // config.inputs_per_group(inputs)
    if codes.groups != groups:
        raise ConfigError(f"the codes have {codes.groups} groups of inputs, {config} has {groups}")
    if codes.codes.numel() and int(codes.codes.max()) >= 2**config.bits:
        raise ConfigError(f"codes up to {int(codes.codes.max())} do not fit {config.bits} bits")
    middle = 2 ** (config.bits - 1)
    if config.symmetric and not bool((codes.zeros == middle).all()):
        raise ConfigError(
            f"the codes have zero points from {float(codes.zeros.min()):g} to {float(codes.zeros.max()):g}, and "
            f"{config} has {middle} alone; use symmetric=False"
        )
    parts: PackedTensors = _kernels_for(target).pack(config, codes, target)
    return parts


def unpack(config: Integers, parts: PackedTensors, matrix: MatrixShape, target: KernelTarget) -> QuantizedMatrix:
    """Read the codes, [outputs, inputs], that were packed for a target; scales are rounded to bfloat16."""
    codes: QuantizedMatrix = _kernels_for(target).unpack(config, parts, matrix, target)
    return codes


def _kernels_for(target: KernelTarget) -> ModuleType:
    if target.device == "cpu":
        from elastic.quant.kernels import cpu

        return cpu
    if target.device == "cuda":
        from elastic.quant.kernels import cuda

        return cuda
    raise ConfigError(f"no integer kernels for device {target.device!r}; use cpu or cuda")


INTEGERS = IntegerFormat()
register(Integers, INTEGERS)
