"""Pruned matrices, drawn by hypothesis."""

from __future__ import annotations

import torch
from hypothesis import assume
from hypothesis import strategies as st

from elastic.quant.formats.base import MatrixShape
from elastic.quant.formats.pruned import SemiStructured, Unstructured
from elastic.quant.pruning.criteria import Sparse

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@st.composite
def configs_and_matrices(draw: st.DrawFn) -> tuple[Sparse, MatrixShape]:
    by = draw(st.sampled_from(["magnitude", "wanda", "sparsegpt"]))
    patterns = st.sampled_from([SemiStructured(2, 4, by), SemiStructured(4, 8, by)])
    config = draw(st.one_of(patterns, st.builds(Unstructured, st.floats(0.1, 0.95), st.just(by))))
    inputs = 8 * draw(st.integers(1, 24))
    assume(isinstance(config, SemiStructured) or config.removed(inputs) < inputs)  # others are refused
    return config, MatrixShape(draw(st.integers(1, 70)), inputs)


def random_matrix(matrix: MatrixShape, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Weights, some of them exactly zero: a weight that stays may be."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(matrix.outputs, matrix.inputs, generator=generator)
    return (weight * (torch.rand(weight.shape, generator=generator) < 0.9)).to(dtype)


def random_inputs(tokens: int, inputs: int, seed: int = 1) -> torch.Tensor:
    """Correlated inputs, of very different sizes, as in trained models."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, inputs, generator=generator) @ torch.randn(inputs, inputs, generator=generator)
    return mixed * torch.randn(inputs, generator=generator).exp()
