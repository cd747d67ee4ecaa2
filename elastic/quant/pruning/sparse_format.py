"""The formats of matrices with semi-structured and unstructured sparsity."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from elastic.errors import ConfigError
from elastic.quant.formats.base import (
    Kernel,
    KernelTarget,
    MatrixShape,
    PackedTensors,
    PartShapes,
    register,
    require_packable,
)
from elastic.quant.formats.pruned import SemiStructured, Sparse, Unstructured
from elastic.quant.kernels.checks import reference_kernel
from elastic.quant.pruning import sparse_cpu, sparse_cuda
from elastic.quant.pruning.criteria import prune
from elastic.quant.pruning.sparse_layout import pack, required, value


class SparseFormat:
    """The format that the sparse kernels of CPUs and of CUDA take."""

    def supports(self, config: Sparse, matrix: MatrixShape) -> str | None:
        """Return None, or in words why a matrix of this shape cannot be packed."""
        if matrix.inputs % 8:
            return f"its {matrix.inputs} inputs are not a multiple of 8"
        if isinstance(config, Unstructured) and config.removed(matrix.inputs) == matrix.inputs:
            return f"of its {matrix.inputs} inputs none would stay"
        return None

    def part_shapes(self, config: Sparse, matrix: MatrixShape, dtype: torch.dtype, target: KernelTarget) -> PartShapes:
        """Return the parts that a matrix of this shape and dtype is packed into, in their order."""
        shapes = required(config, matrix, dtype)
        if isinstance(config, SemiStructured) and sparse_cuda.takes(config, matrix, target, dtype):
            return sparse_cuda.shapes_with_metadata(shapes, matrix)
        return shapes

    def quantize(
        self, config: Sparse, weight: torch.Tensor, inputs: torch.Tensor | None, target: KernelTarget
    ) -> PackedTensors:
        """Prune a matrix and pack it; without inputs, by magnitude.

        weight: [outputs, inputs]. inputs: [tokens, inputs], samples; both of any float dtype. Raises `ConfigError` for
        a shape that is not supported.
        """
        matrix = require_packable(config, weight.shape)
        return _for_target(config, pack(config, *prune(weight, config, inputs)), matrix, target)

    def value(self, config: Sparse, parts: PackedTensors, matrix: MatrixShape, target: KernelTarget) -> torch.Tensor:
        """Expand parts to the matrix that they stand for, float32 [outputs, inputs]."""
        return value(sparse_cuda.with_mask(parts), matrix)

    def paths(
        self, config: Sparse, parts: PackedTensors, matrix: MatrixShape, target: KernelTarget
    ) -> Mapping[str, Kernel]:
        """Return the kernels that multiply x: [tokens, inputs] with such parts, by name."""
        reference = reference_kernel(lambda parts: self.value(config, parts, matrix, target))
        if target.device == "cpu":
            return {**sparse_cpu.paths(config, parts, matrix), "reference": reference}
        if target.device == "cuda":
            return {**sparse_cuda.paths(config, parts, matrix, target), "reference": reference}
        raise ConfigError(f"no sparse kernels for device {target.device!r}; use cpu or cuda")

    def repack(
        self, config: Sparse, parts: PackedTensors, matrix: MatrixShape, packed_for: KernelTarget, target: KernelTarget
    ) -> PackedTensors:
        """Return the parts of the same [outputs, inputs] matrix for another target: the very same weights stay."""
        return _for_target(config, sparse_cuda.with_mask(parts), matrix, target)


def _for_target(config: Sparse, parts: PackedTensors, matrix: MatrixShape, target: KernelTarget) -> PackedTensors:
    """Return parts that have a mask in the form that the kernels of a target take."""
    if isinstance(config, SemiStructured) and sparse_cuda.takes(config, matrix, target, parts["packed"].dtype):
        return sparse_cuda.with_metadata(parts)
    return parts


SPARSE = SparseFormat()
register(SemiStructured, SPARSE)
register(Unstructured, SPARSE)
