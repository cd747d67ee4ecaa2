"""The format of matrices in 8, 4 or 3 bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from elastic.errors import ConfigError
from elastic.quant.formats.awq_search import search_scales
from elastic.quant.formats.base import Format, Kernel, KernelTarget, MatrixShape, PackedTensors, PartShapes, register
from elastic.quant.formats.integer import Integers, QuantizedMatrix, round_to_nearest
from elastic.quant.kernels import cpu, cuda
from elastic.quant.kernels.checks import reference_kernel
from elastic.quant.kernels.cpu_layout import CpuLayout
from elastic.quant.kernels.cuda_layout import CudaLayout


@dataclass(frozen=True)
class IntegerFormat(Format):
    """The format that the integer kernels of CPUs and of CUDA take."""

    config: Integers
    layout: CpuLayout | CudaLayout = field(init=False, repr=False, compare=False)
    """How codes lie for the target."""

    def __post_init__(self) -> None:
        super().__post_init__()
        layouts: dict[str, type[CpuLayout] | type[CudaLayout]] = {"cpu": CpuLayout, "cuda": CudaLayout}
        device = self.target.device
        if device not in layouts:
            raise ConfigError(f"no integer kernels for device {device!r}; use cpu or cuda")
        object.__setattr__(self, "layout", layouts[device](self.config, self.matrix, self.target))

    @staticmethod
    def supports(config: Integers, matrix: MatrixShape) -> str | None:
        """Return None, or in words why a matrix of this shape cannot be packed."""
        if matrix.outputs % 16 or matrix.inputs % 16:
            return f"{matrix.outputs} outputs and {matrix.inputs} inputs are not multiples of 16"
        size = config.inputs_per_group(matrix.inputs)
        if matrix.inputs % size:
            return f"group_size={size} does not divide {matrix.inputs} inputs"
        return None

    def part_shapes(self, dtype: torch.dtype) -> PartShapes:
        """Return the parts that a matrix is packed into, in their order; the same for every dtype."""
        return self.layout.part_shapes

    def quantize(self, weight: torch.Tensor, inputs: torch.Tensor | None) -> PackedTensors:
        """Pack a matrix: its nearest codes, or codes with scales searched for its inputs (AWQ).

        weight: [outputs, inputs]. inputs: [tokens, inputs], samples; both of any float dtype.
        """
        config = self.config
        return self.pack(round_to_nearest(weight, config) if inputs is None else search_scales(weight, inputs, config))

    def pack(self, codes: QuantizedMatrix) -> PackedTensors:
        """Lay codes, [outputs, inputs], out as the parts that the kernels of the target take.

        Raises `ConfigError` where the codes are not of this config.
        """
        config, groups = self.config, self.matrix.inputs // self.config.inputs_per_group(self.matrix.inputs)
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
        return self.layout.pack(codes)

    def value(self, parts: PackedTensors) -> torch.Tensor:
        """Expand parts to the matrix that they stand for, float32 [outputs, inputs]."""
        return self.layout.unpack(parts).value()

    def paths(self, parts: PackedTensors) -> Mapping[str, Kernel]:
        """Return the kernels that multiply x: [tokens, inputs] with such parts, by name."""
        layout = self.layout
        kernels = cpu.paths(layout, parts) if isinstance(layout, CpuLayout) else cuda.paths(layout)
        return {**kernels, "reference": reference_kernel(self.value)}

    def repack(self, parts: PackedTensors, target: KernelTarget) -> PackedTensors:
        """Return the parts of the same [outputs, inputs] matrix for another target, with the very same codes."""
        if target == self.target:
            return parts
        codes = self.layout.unpack(parts)
        if self.config.symmetric:  # zero points cannot be read where a scale is zero, or no number
            codes = replace(codes, zeros=torch.full_like(codes.zeros, 2 ** (self.config.bits - 1)))
        return replace(self, target=target).pack(codes)


register(Integers, IntegerFormat)
