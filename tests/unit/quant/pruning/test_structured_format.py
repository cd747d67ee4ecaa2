"""Smaller matrices: what is left out is zero, and their products are those of the matrix with zeros."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic import ConfigError, Structured
from elastic.quant.formats.base import KernelTarget, MatrixShape, format_of
from elastic.quant.pruning.structured_format import StructuredFormat, without
from support.pruned_matrices import DTYPES, random_matrix

CPU = KernelTarget.of(torch.device("cpu"))
CONFIG = Structured(ffn=0.5)


@given(st.data(), st.integers(1, 40), st.integers(1, 40), st.sampled_from([0, 1]), DTYPES, st.integers(1, 9))
@settings(max_examples=60)
def test_products_are_those_of_the_matrix_with_zeros(
    data: st.DataObject, outputs: int, inputs: int, dim: int, dtype: torch.dtype, tokens: int
) -> None:
    matrix = MatrixShape(outputs, inputs)
    channels = (outputs, inputs)[dim]
    kept = torch.tensor(sorted(data.draw(st.sets(st.integers(0, channels - 1), min_size=1))))
    weight = random_matrix(matrix, dtype)
    gone = torch.ones(channels, dtype=torch.bool)
    gone[kept] = False
    expected = weight.clone().index_fill_(dim, gone.nonzero().view(-1), 0)
    parts = without(weight, dim, kept)
    assert parts["packed"].numel() == weight.numel() // channels * len(kept)
    assert torch.equal(format_of(CONFIG)(CONFIG, matrix, CPU).value(parts), expected.float())
    x = torch.randn(tokens, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = x.double() @ expected.double().t()
    bound = 2 * ((x.bfloat16() @ expected.bfloat16().t()).double() - exact).norm() + 1e-6 * exact.norm() + 1e-6
    paths = format_of(CONFIG)(CONFIG, matrix, CPU).paths(parts)
    assert paths.keys() == {"dense", "reference"}
    for path in paths.values():
        y = path(x, parts)
        assert y.dtype == dtype
        assert (y.double() - exact).norm() <= bound
        if dim == 0:
            assert not y[:, gone].any()
    renewed = StructuredFormat(CONFIG, matrix, CPU).renew(parts, weight + 1)
    assert torch.equal(renewed["packed"], (weight + 1).index_select(dim, kept))


def test_channels_are_not_chosen_for_one_matrix() -> None:
    with pytest.raises(ConfigError, match="pack the whole layer"):
        format_of(CONFIG)(CONFIG, MatrixShape(16, 16), CPU).quantize(torch.randn(16, 16), None)


def test_parts_of_another_shape_are_refused() -> None:
    parts = without(torch.randn(16, 8), 0, torch.arange(4))
    path = format_of(CONFIG)(CONFIG, MatrixShape(16, 8), CPU).paths(parts)["dense"]
    with pytest.raises(ConfigError, match="part 'packed'"):
        path(torch.randn(2, 8), {**parts, "packed": parts["packed"][:3]})
    with pytest.raises(ConfigError, match="part 'outputs'"):
        path(torch.randn(2, 8), {**parts, "outputs": parts["outputs"][:3]})
