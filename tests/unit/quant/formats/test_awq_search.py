"""The search never loses against the nearest codes on its sample, and wins where inputs are uneven."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.errors import ConfigError
from elastic.quant.formats.awq_search import search_scales
from elastic.quant.formats.base import evenly
from elastic.quant.formats.integer import Integers, QuantizedMatrix, round_to_nearest

CONFIGS = st.builds(
    Integers, bits=st.sampled_from((8, 4, 3)), group_size=st.sampled_from((-1, 16, 32)), symmetric=st.booleans()
)


def error(weight: torch.Tensor, codes: QuantizedMatrix, inputs: torch.Tensor) -> float:
    return float((inputs.float() @ (codes.value() - weight.float()).t()).norm())


def outliers(tokens: int = 200, size: int = 64) -> torch.Tensor:
    """Inputs of which every ninth is thirty times as large, as in trained models."""
    inputs = torch.randn(tokens, size, generator=torch.Generator().manual_seed(1))
    inputs[:, ::9] *= 30
    return inputs


def matrix(outputs: int = 96, inputs: int = 64) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(2))


@given(config=CONFIGS, tokens=st.integers(1, 80), spread=st.floats(0, 5), seed=st.integers(0, 2**32))
@settings(max_examples=40)
def test_it_is_never_worse_than_the_nearest_codes(config: Integers, tokens: int, spread: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(24, 64, generator=generator)
    inputs = torch.randn(tokens, 64, generator=generator) * (spread * torch.randn(64, generator=generator)).exp()
    codes = search_scales(weight, inputs, config)
    plain = error(weight, round_to_nearest(weight, config), inputs)
    assert error(weight, codes, inputs) <= plain * (1 + 1e-4)  # sums in another order
    assert codes.codes.dtype == torch.uint8
    assert int(codes.codes.max()) < 2**config.bits
    if codes.input_scale is not None:
        assert codes.input_scale.shape == (64,)
        assert codes.input_scale.isfinite().all()
        assert (codes.input_scale > 0).all()


@pytest.mark.parametrize("bits", [8, 4, 3])
def test_large_inputs_get_finer_steps(bits: int) -> None:
    weight, inputs, config = matrix(), outliers(), Integers(bits, 32)
    codes = search_scales(weight, inputs, config)
    assert codes.input_scale is not None
    assert codes.input_scale[::9].min() > codes.input_scale[1::9].max()
    assert 1.5 * error(weight, codes, inputs) < error(weight, round_to_nearest(weight, config), inputs)
    other = outliers(64).roll(7, 0) * 1.5
    assert 1.5 * error(weight, codes, other) < error(weight, round_to_nearest(weight, config), other)


def test_the_value_is_for_inputs_as_they_are() -> None:
    weight = matrix()
    codes = search_scales(weight, outliers(), Integers(8, 32))
    assert codes.input_scale is not None
    assert float((codes.value() - weight).norm() / weight.norm()) < 0.02


def test_extremes_are_clipped_where_that_helps() -> None:
    """Inputs of equal size leave nothing to scale."""
    weight, config = matrix(), Integers(3, 64, symmetric=True)
    weight[:, 0] = 5
    inputs = torch.randn(200, 64, generator=torch.Generator().manual_seed(3)).sign()
    codes, plain = search_scales(weight, inputs, config), round_to_nearest(weight, config)
    assert codes.input_scale is None
    assert codes.scales.mean() < 0.9 * plain.scales.mean()
    assert error(weight, codes, inputs) < 0.9 * error(weight, plain, inputs)


def test_inputs_that_are_always_zero_survive() -> None:
    inputs = outliers()
    inputs[:, 5] = 0
    inputs[:, 32:] = 0
    codes = search_scales(matrix(), inputs, Integers(4, 16))
    assert codes.input_scale is not None
    assert codes.value().isfinite().all()
    assert (codes.input_scale > 0).all()


def test_the_weights_of_an_input_that_the_sample_lacks_stay() -> None:
    weight, inputs = matrix(), outliers()
    inputs[:, 5] = 0
    codes = search_scales(weight, inputs, Integers(8, -1, symmetric=True))
    assert codes.input_scale is not None
    assert float((codes.value() - weight)[:, 5].norm() / weight[:, 5].norm()) < 0.05


@pytest.mark.parametrize("inputs", [torch.zeros(3, 64), torch.zeros(0, 64)], ids=["zeros", "no tokens"])
def test_without_a_known_input_the_nearest_codes_are_the_answer(inputs: torch.Tensor) -> None:
    codes, plain = (
        search_scales(matrix(), inputs, Integers(4, 16)),
        round_to_nearest(matrix(), Integers(4, 16)),
    )
    assert codes.input_scale is None
    assert torch.equal(codes.codes, plain.codes)
    assert torch.equal(codes.scales, plain.scales)


def test_many_tokens_and_outputs_are_sampled_the_same_way_each_time() -> None:
    weight, inputs = matrix(1100).bfloat16(), outliers(3000).bfloat16()
    before = weight.clone(), inputs.clone()
    first, second = (search_scales(weight, inputs, Integers(4, 32)) for _ in range(2))
    assert first.input_scale is not None
    assert second.input_scale is not None
    assert torch.equal(first.codes, second.codes)
    assert torch.equal(first.input_scale, second.input_scale)
    assert 1.5 * error(weight, first, inputs) < error(weight, round_to_nearest(weight, Integers(4, 32)), inputs)
    assert torch.equal(weight, before[0])
    assert torch.equal(inputs, before[1])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (torch.zeros(3, 63), r"\[3, 63\].*\[tokens, 64\]"),
        (torch.zeros(64), r"\[64\].*\[tokens, 64\]"),
        (torch.full((3, 64), torch.inf), "not finite"),
        (torch.full((3, 64), torch.nan), "not finite"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(inputs: torch.Tensor, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        search_scales(matrix(), inputs, Integers(4, 16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_are_taken_evenly_whatever_torchs_default_dtype_is(dtype: torch.dtype) -> None:
    """In 16 bits, their numbers would be rounded, beyond the last."""
    rows, expected = torch.arange(70_000), evenly(torch.arange(70_000), 512)
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(evenly(rows, 512), expected)
    finally:
        torch.set_default_dtype(torch.float32)
    assert [len(expected), int(expected[0]), int(expected[-1])] == [512, 0, 69_999]
