"""The formats of matrices with semi-structured and unstructured sparsity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from elastic.errors import ConfigError
from elastic.quant.formats.base import Format, Kernel, KernelTarget, MatrixShape, PackedTensors, PartShapes, register
from elastic.quant.formats.pruned import SemiStructured, Sparse, Unstructured
from elastic.quant.kernels.checks import reference_kernel
from elastic.quant.pruning import sparse_cpu, sparse_cuda
from elastic.quant.pruning.criteria import prune
from elastic.quant.pruning.sparse_layout import expand, pack, required, tiles


@dataclass(frozen=True)
class SparseFormat(Format):
    """The format that the sparse kernels of CPUs and of CUDA take."""

    config: Sparse

    @staticmethod
    def supports(config: Sparse, matrix: MatrixShape) -> str | None:
        """Return None, or in words why a matrix of this shape cannot be packed."""
        if matrix.inputs % 8:
            return f"its {matrix.inputs} inputs are not a multiple of 8"
        if isinstance(config, Unstructured) and config.removed(matrix.inputs) == matrix.inputs:
            return f"of its {matrix.inputs} inputs none would stay"
        return None

    def part_shapes(self, dtype: torch.dtype) -> PartShapes:
        """Return the parts that a matrix of this dtype is packed into, in their order."""
        shapes = required(self.config, self.matrix, dtype)
        return sparse_cuda.shapes_with_metadata(shapes, self.matrix) if self._has_metadata(dtype) else shapes

    def quantize(self, weight: torch.Tensor, inputs: torch.Tensor | None) -> PackedTensors:
        """Prune a matrix and pack it; without inputs, by magnitude.

        weight: [outputs, inputs]. inputs: [tokens, inputs], samples; both of any float dtype.
        """
        parts = pack(self.config, *prune(weight, self.config, inputs))
        return sparse_cuda.with_metadata(parts) if self._has_metadata(weight.dtype) else parts

    def value(self, parts: PackedTensors) -> torch.Tensor:
        """Expand parts to the matrix that they stand for, float32 [outputs, inputs], with zeros where it was pruned."""
        masked, device = sparse_cuda.with_mask(parts), parts["packed"].device
        whole = torch.empty(self.matrix.outputs, self.matrix.inputs, dtype=torch.float32, device=device)
        for rows in tiles(masked, self.matrix, 2**20):
            whole[rows[0] : rows[1]] = expand(masked, rows)
        return whole

    def paths(self, parts: PackedTensors) -> Mapping[str, Kernel]:
        """Return the kernels that multiply x: [tokens, inputs] with such parts, by name."""
        reference = reference_kernel(self.value)
        if self.target.device == "cpu":
            return {**sparse_cpu.paths(self.config, parts, self.matrix), "reference": reference}
        if self.target.device == "cuda":
            return {**sparse_cuda.paths(self.config, parts, self.matrix, self.target), "reference": reference}
        raise ConfigError(f"no sparse kernels for device {self.target.device!r}; use cpu or cuda")

    def repack(self, parts: PackedTensors, target: KernelTarget) -> PackedTensors:
        """Return the parts of the same [outputs, inputs] matrix for another target: the very same weights stay."""
        masked, there = sparse_cuda.with_mask(parts), replace(self, target=target)
        return sparse_cuda.with_metadata(masked) if there._has_metadata(parts["packed"].dtype) else masked

    def _has_metadata(self, dtype: torch.dtype) -> bool:
        """Return whether the kernels of the target take metadata in place of the mask, for weights of a dtype."""
        config = self.config
        return isinstance(config, SemiStructured) and sparse_cuda.takes(config, self.matrix, self.target, dtype)


register(SemiStructured, SparseFormat)
register(Unstructured, SparseFormat)
