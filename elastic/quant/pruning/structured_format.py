"""The format of matrices from which whole outputs or whole inputs were removed: a smaller dense matrix.

    packed   the weights that stay, [outputs that stay, inputs], or [outputs, inputs that stay]
    outputs  int32, the outputs that stay, ascending; the others of a product are zero
    inputs   int32, the inputs that stay, ascending; the others are not read

One of `outputs` and `inputs` is there. The product has the shape that the full matrix would give it, so that biases,
adapters and hooks around it see what they know. It is the same on CPUs and CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from elastic.errors import ConfigError
from elastic.quant.formats.base import (
    BoundKernel,
    Format,
    Kernel,
    MatrixShape,
    PackedTensors,
    PartShapes,
    register,
)
from elastic.quant.formats.pruned import Structured
from elastic.quant.kernels.checks import CheckedKernel, Required, reference_kernel


@dataclass(frozen=True)
class StructuredFormat(Format):
    """The format of smaller matrices."""

    def part_shapes(self, dtype: torch.dtype) -> PartShapes:
        """Raise `ConfigError`: how much is removed is known for a layer, not for a matrix by itself."""
        raise ConfigError(
            f"{self.config} removes channels that several matrices of a layer share; ask for the whole layer"
        )

    def quantize(self, weight: torch.Tensor, inputs: torch.Tensor | None) -> PackedTensors:
        """Raise `ConfigError`: what is removed is chosen for a layer, not for a matrix of any shape by itself."""
        raise ConfigError(
            f"{self.config} removes channels that several matrices of a layer share; pack the whole layer"
        )

    def value(self, parts: PackedTensors) -> torch.Tensor:
        """Expand parts to the matrix that they stand for, float32 [outputs, inputs], with zeros where it was pruned."""
        device = parts["packed"].device
        whole = torch.zeros(self.matrix.outputs, self.matrix.inputs, dtype=torch.float32, device=device)
        dim, kept = _kept(parts)
        return whole.index_copy_(dim, kept.long(), parts["packed"].float())

    def paths(self, parts: PackedTensors) -> Mapping[str, Kernel]:
        """Return the kernels that multiply x: [tokens, inputs] with such parts, by name."""
        matrix, (dim, kept) = self.matrix, _kept(parts)
        shape = (len(kept), matrix.inputs) if dim == 0 else (matrix.outputs, len(kept))
        shapes: Required = {
            "packed": (shape, parts["packed"].dtype),
            "outputs" if dim == 0 else "inputs": ((len(kept),), torch.int32),
        }
        dense = CheckedKernel(matrix, shapes, lambda parts: _bind(parts, matrix))
        return {"dense": dense, "reference": reference_kernel(self.value)}

    def renew(self, parts: PackedTensors, weight: torch.Tensor) -> PackedTensors:
        """Pack new weights, [outputs, inputs], with the channels that were chosen for the old ones."""
        return without(weight, *_kept(parts))


def without(weight: torch.Tensor, dim: int, kept: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the parts of a matrix, [outputs, inputs], of which only some outputs (dim 0) or inputs (dim 1) stay.

    kept: [channels that stay], ascending.
    """
    chosen = kept.to(weight.device, torch.int32)
    packed = weight.detach().index_select(dim, chosen).contiguous()
    return {"packed": packed, "outputs" if dim == 0 else "inputs": chosen}


def _kept(parts: PackedTensors) -> tuple[int, torch.Tensor]:
    return (0, parts["outputs"]) if "outputs" in parts else (1, parts["inputs"])


def _bind(parts: PackedTensors, matrix: MatrixShape) -> BoundKernel:
    """Fix the parts of a product, for x: [tokens, inputs] -> [tokens, outputs]."""
    (dim, kept), packed = _kept(parts), parts["packed"]

    def product(x: torch.Tensor) -> torch.Tensor:
        values = x.to(packed.dtype)
        if dim == 1:
            return values.index_select(1, kept) @ packed.t()
        return values.new_zeros(x.shape[0], matrix.outputs).index_copy_(1, kept.long(), values @ packed.t())

    return product


register(Structured, StructuredFormat)
